"""The output of a run as a stream of bytes: live while it runs, the stored artifact afterwards, without a seam between them."""

from collections.abc import AsyncGenerator
from typing import Final

import msgspec
import trio
from sqlalchemy import select

from .aggregate import TERMINAL, latest_attempt, load_run
from .artifact_store import ArtifactKey, ArtifactStore
from .database import Database, Transaction
from .live_output import LiveOutput
from .schema import artifacts

CHUNK_BYTES: Final = 64 * 1024
POLL_S: Final = 0.2


class _Source(msgspec.Struct, frozen=True):
    """Where the newest attempt's output is now."""

    is_over: bool
    attempt_id: str | None
    key: ArtifactKey | None = None
    sha256: str = ""
    truncated: bool = False


class RunLog:
    """Reads the output of runs. Everything that blocks happens in a thread."""

    def __init__(self, database: Database, store: ArtifactStore, live: LiveOutput) -> None:
        self._database = database
        self._store = store
        self._live = live

    async def stream(self, run_id: str, stopping: trio.Event | None) -> AsyncGenerator[bytes, None]:
        """The output of the newest attempt. With `stopping` it goes on until the run is over or the event is set.

        A log that was cut cannot be continued where the live view ended; a line says so instead.
        """
        position, attempt_id, is_cut = 0, None, False
        while True:
            # Read before the files: an artifact is stored before its run is over, so an over run's log is whole.
            source = await self._database.run(_source, run_id)
            if source.attempt_id != attempt_id:
                position, attempt_id, is_cut = 0, source.attempt_id, False
            if source.key is not None and source.truncated and position and not is_cut:
                is_cut = True
                yield _cut_note(run_id)
            while not is_cut and (chunk := await trio.to_thread.run_sync(self._read, source, position)):
                position += len(chunk)
                yield chunk
            if source.is_over or stopping is None or stopping.is_set():
                return
            with trio.move_on_after(POLL_S):
                await stopping.wait()

    def _read(self, source: _Source, position: int) -> bytes:
        if source.key is not None:
            return self._store.read(source.key, source.sha256, position, CHUNK_BYTES)
        return b"" if source.attempt_id is None else self._live.read(source.attempt_id, position, CHUNK_BYTES)


def _source(tx: Transaction, run_id: str) -> _Source:
    run, attempt = load_run(tx, run_id), latest_attempt(tx, run_id)
    if run is None or attempt is None:
        return _Source(is_over=True, attempt_id=None)
    is_over = run.status in TERMINAL
    stored = tx.row(
        select(artifacts)
        .where(artifacts.c.attempt_id == attempt.id, artifacts.c.run_id == run_id)
        .order_by(artifacts.c.stored_at_ms.desc())
        .limit(1)
    )
    if stored is None:
        return _Source(is_over, attempt.id)
    key = ArtifactKey(stored.project_id, run_id, attempt.id, stored.log_artifact_id)
    return _Source(is_over, attempt.id, key, stored.sha256, bool(stored.truncated))


def _cut_note(run_id: str) -> bytes:
    return f"\n[the output was cut; the stored log is shown by: qlcontrol run logs {run_id}]\n".encode()
