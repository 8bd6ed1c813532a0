"""The form of an answer to a box or a worker: JSON that nobody keeps and no browser guesses about (control-plane.md §15.3)."""

from typing import Final

from starlette.responses import Response

from ..domain.canonical import js_json
from .failure import Failure

_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def json_answer(status: int, content: bytes) -> Response:
    """An answer whose body is JSON already."""
    return Response(content, status, _HEADERS, "application/json; charset=utf-8")


def failed(failure: Failure) -> Response:
    """The answer to a request that ended without success: its code and nothing else."""
    response = json_answer(failure.status, js_json({"code": failure.code}))
    if failure.retry_after_s is not None:
        response.headers["Retry-After"] = str(failure.retry_after_s)
    return response
