"""The launch of one acknowledged offer: prepare, raise the barrier on disk, spawn held, record the handle, open the gate.

Steps 6 to 9 of ADR-0021 §1 and steps 3 to 6 of ADR-0111 §2; design.md §2 "The gate". Whatever fails before the barrier is a
start failure. Whatever is uncertain behind it closes the gate, reports nothing, and leaves the record for the evidence.
"""

from typing import Final

import msgspec
import trio

from ..domain.canonical import callback_token_digest, log_artifact_id
from ..domain.environment import documented_variables, match_revision
from ..domain.errors import Conflict, Refused
from ..domain.identity import DurableHandle
from ..domain.offer import Offer
from ..domain.record import Event, InboxRecord, advance
from ..domain.revision import ArgvCommand
from ..domain.text import INT31, new_capability
from ..ports import Held, Inbox, LaunchPlan, Log, OutputStore, Processes, Receipts, Rejected
from .materialise import Materialiser
from .server_clock import ServerClock

BARRIER_LIMIT_S: Final = 30.0
"""A shutdown does not interrupt between the barrier and the gate; this bounds how long it may have to wait."""


class Prepared(msgspec.Struct, frozen=True):
    """Everything ready that can be thrown away again: nothing was spawned and no barrier raised (R131, R132)."""

    argv: list[str]
    environment: dict[str, str]
    working_directory: str
    log_artifact_id: str
    callback_sequence: int


class LaunchTerms(msgspec.Struct, frozen=True):
    """`directory` is where a command starts when its revision names none; `search_path` is where an interpreter named
    without a directory is looked for."""

    directory: str
    search_path: str


class Launcher:
    """Launches. It owns no connection, no timer and no process: all of them are ports (R153)."""

    def __init__(
        self,
        inbox: Inbox,
        processes: Processes,
        receipts: Receipts,
        outputs: OutputStore,
        materialiser: Materialiser,
        server_clock: ServerClock,
        log: Log,
        terms: LaunchTerms,
    ) -> None:
        self._inbox = inbox
        self._processes = processes
        self._receipts = receipts
        self._outputs = outputs
        self._materialiser = materialiser
        self._server_clock = server_clock
        self._log = log
        self._terms = terms

    async def prepare(self, offer: Offer, callback_sequence: int) -> Prepared:
        """Everything the launch needs. Raises Refused when it can never start, Transient when it may later."""
        if callback_sequence > INT31:
            raise Refused("cannot start: no callback sequence is left for this attempt")
        made = await self._materialiser.materialise(offer)
        try:
            environment = match_revision(offer.execution_revision, made.bindings, made.bundle)
        except ValueError as error:
            raise Refused(f"cannot start: {error}") from None
        directory = offer.execution_revision.working_directory
        prepared = Prepared(
            argv=_argv(offer),
            environment={**documented_variables(offer), **environment},
            working_directory=directory if isinstance(directory, str) else self._terms.directory,
            log_artifact_id=log_artifact_id(offer.candidate.project_id, offer.run_id, offer.attempt_id, offer.offer_id),
            callback_sequence=callback_sequence,
        )
        rejected = self._processes.precheck(
            prepared.argv, prepared.working_directory, environment.get("PATH", self._terms.search_path), prepared.environment
        )
        if rejected is not None:
            raise Refused(f"cannot start: {rejected.reason}")
        return prepared

    async def launch(self, record: InboxRecord, prepared: Prepared) -> bool:
        """Leaves the record STARTED with an open gate, START_FAILED when proven, or LAUNCHING when uncertain; says whether
        the gate was opened.

        Raises Refused before the barrier when the output cannot be prepared. The caller holds the offer's lock and saw the
        lease alive. The capability is made here and wiped here, whatever happens (R397); between the barrier and the gate
        nothing is cancelled.
        """
        token = new_capability()
        try:
            output = await self._outputs.prepare(prepared.log_artifact_id)
            receipt = self._receipts.path(record.offer.attempt_id)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + BARRIER_LIMIT_S):
                now_ms = self._server_clock.now_ms()
                offer = record.offer
                launching = advance(
                    record,
                    Event.BARRIER_RAISED,
                    now_ms,
                    # Never before the attempt was created, whatever the clocks say: the control plane refuses that (§0.5).
                    executor_started_at_ms=max(now_ms, offer.candidate.attempt_created_at_ms),
                    log_artifact_id=prepared.log_artifact_id,
                    completion_receipt_callback_sequence=prepared.callback_sequence,
                    completion_receipt_token_digest=callback_token_digest(token),
                )
                await self._inbox.replace(launching)
                plan = LaunchPlan(
                    run_id=offer.run_id,
                    attempt_id=offer.attempt_id,
                    callback_sequence=prepared.callback_sequence,
                    token=token,
                    started_at_ms=_started_at(launching),
                    argv=prepared.argv,
                    environment=prepared.environment,
                    working_directory=prepared.working_directory,
                    output=output,
                    receipt=receipt,
                )
                return await self._spawn(launching, plan)
            return False
        finally:
            token[:] = bytes(len(token))

    async def _spawn(self, launching: InboxRecord, plan: LaunchPlan) -> bool:
        """Only `rejected` proves that nothing ran; an error, an unknown answer or an unusable handle proves nothing
        (R383 to R391)."""
        try:
            result = await self._processes.launch(plan)
        except Exception as error:
            # Whatever an executor raises, it may have had effects.
            self._log.error("launch_outcome_unknown", offer=launching.offer_id, error=type(error).__name__)
            return False
        if isinstance(result, Rejected):
            self._log.warning("launch_rejected", offer=launching.offer_id, reason=result.reason)
            await self._inbox.replace(advance(launching, Event.NOT_STARTED, self._server_clock.now_ms()))
            return False
        if not isinstance(result, Held):
            self._log.error("launch_outcome_unknown", offer=launching.offer_id, error="unknown answer of the executor")
            return False
        is_open = False
        try:
            handle = DurableHandle.parse(result.handle.text())
            await self._inbox.replace(
                advance(launching, Event.HANDLE_RECORDED, self._server_clock.now_ms(), executor_handle=handle.text())
            )
            await result.gate.open()
            is_open = True
        except Exception as error:
            # Also an unusable handle. It may or may not be on disk: what is there decides what comes next.
            self._log.error("launch_abandoned", offer=launching.offer_id, error=type(error).__name__)
        finally:
            if not is_open:
                # Makes sure that the command never runs, and the launcher's receipt will prove it; also when the disk hung for
                # so long that this was cancelled.
                with trio.CancelScope(shield=True):
                    await result.gate.abandon()
        if is_open:
            self._log.info("command_started", offer=launching.offer_id, attempt=plan.attempt_id, launcher=handle.p)
        return is_open


def _argv(offer: Offer) -> list[str]:
    command = offer.execution_revision.command
    if isinstance(command, ArgvCommand):
        return [command.file, *command.args]
    shell = command.shell if isinstance(command.shell, str) else "/bin/sh"
    return [shell, "-c", command.command]


def _started_at(record: InboxRecord) -> int:
    if not isinstance(record.executor_started_at_ms, int):
        raise Conflict("internal error: a launching record has no start time")
    return record.executor_started_at_ms
