"""The OpenAPI 3.1 document of the operator listener, made of its table of operations and the types of its documents.

`python -m qlworker.control.openapi` prints it; docs/openapi.json is what it prints.
"""

import re
import sys
from typing import Any, Final

import msgspec

from .. import __version__
from .operator_api import Failure
from .operator_operations import BYTES, OPERATIONS, Operation

_REFERENCE: Final = "#/components/schemas/{name}"
_PATH_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_REFUSALS: Final = {
    "400": "The request is malformed; the text says what and how to mend it. Nothing changed.",
    "409": "What is stored does not allow it. Nothing changed.",
    "500": "It could not be done; the text says why.",
}


def document() -> dict[str, Any]:
    """The whole document, ready for JSON."""
    kinds = [kind for each in OPERATIONS for kind in (each.body, each.answer) if kind not in (None, BYTES)]
    schemas, components = msgspec.json.schema_components([*kinds, Failure], ref_template=_REFERENCE)
    schema_of = dict(zip(map(repr, [*kinds, Failure]), schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "qlcontrol, operator listener",
            "version": __version__,
            "description": "Served on a private Unix socket: whoever may open it may do everything here.",
        },
        "servers": [{"url": "http://qlcontrol", "description": "the Unix socket; the host's name is not looked at"}],
        "paths": paths,
        "components": {"schemas": components},
    }


def _described(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {
            "200": {"description": "It is done.", "content": _content(operation.answer, schema_of)},
            **{status: _refusal(text, schema_of) for status, text in _REFUSALS.items()},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(operation.path)
    ] + [
        {
            "name": each.name,
            "in": "query",
            "required": each.is_required,
            "description": each.meaning,
            "schema": {"type": each.kind},
        }
        for each in operation.query
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body, schema_of)}
    return described


def _content(kind: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    if kind is BYTES:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"application/json": {"schema": schema_of[repr(kind)]}}


def _refusal(text: str, schema_of: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": _content(Failure, schema_of)}


def text() -> str:
    """The document as it is printed."""
    return msgspec.json.format(msgspec.json.encode(document()), indent=1).decode() + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
