"""The live view's authority: the same fence as an upload, and no row is ever changed (an extension beside the contract)."""

import msgspec

from ...domain.errors import Refused
from ...wire.completion import OUTPUT_SCHEMA, OutputRequest, OutputResponse
from ..config import Settings
from ..database import Transaction
from ..live_output import LiveOutput
from .artifacts import authorise, load_artifact
from .session import Caller


class View(msgspec.Struct, frozen=True):
    """What an authorised chunk meets."""

    stop_requested: bool
    is_stored: bool


def look(tx: Transaction, caller: Caller, request: OutputRequest, settings: Settings) -> View:
    """Proves that the caller may show output of this attempt. Raises Fenced."""
    claim = authorise(tx, caller, request, settings)
    stored = load_artifact(tx, request.attempt_id, request.log_artifact_id)
    return View(stop_requested=claim.run.cancel_requested_at_ms is not None, is_stored=stored is not None)


def show(live: LiveOutput, request: OutputRequest, view: View) -> OutputResponse:
    """Puts the chunk into the view, unless the whole log is stored already. Blocks. Raises Refused for an id that cannot name
    a file."""
    reached = request.offset + len(request.data)
    if not view.is_stored:
        try:
            reached = live.write(request.attempt_id, request.offset, request.data)
        except ValueError as error:
            raise Refused(str(error)) from None
    return OutputResponse(schema=OUTPUT_SCHEMA, next_offset=reached, stop_requested=view.stop_requested)
