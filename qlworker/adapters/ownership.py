"""The journal's lock: one process owns a root, and knows when it no longer does.

`<root>/.owner.lock/` is the lock, taken by mkdir; `owner.json` inside says who took it; the directory's mtime, set again every
half window, shows that the owner lives. `<root>/.owner.guard` is locked by the kernel only while somebody decides about a
takeover, so two that see the same dead owner cannot both displace it. Never compares an mtime with a clock: a wall clock that
steps displaces nobody. Source: R75 to R88, wire-protocol.md §10.2.
"""

import errno
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import trio

from ..domain.errors import Corrupt, OwnershipHeld, OwnershipLost
from ..domain.identity import Place, ProcessId
from ..domain.ownership import OWNER_BYTES, WINDOW_MS, OwnerRecord, Standing, check_window, standing
from ..ports import Clock
from . import durable

_GUARD_PATIENCE_MS: Final = 10_000
_RELEASE_PATIENCE_MS: Final = 500
_GUARD_POLL_MS: Final = 10
_LOOKS_PER_WINDOW: Final = 8
# The coarsest mtime of a Linux file system is FAT's, two seconds: each refresh moves by at least that much.
_STAMP_STEP_NS: Final = 2_000_000_000
# With these nobody else can make or remove a lock either, so a refresh that fails with them gives nothing away.
_NOBODY_CAN_WRITE: Final = frozenset({errno.EROFS, errno.ENOSPC, errno.EDQUOT})


class _Sight(msgspec.Struct, frozen=True):
    """What a lock directory looked like: it is the same and untouched if all three are equal."""

    device: int
    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "_Sight":
        return cls(status.st_dev, status.st_ino, status.st_mtime_ns)


class JournalOwnership:
    """Ownership of the journal below `root` by the process `me`, which lives at `place`.

    One object owns at most once: after a release or a loss it stays without (R86). `check` and `refresh` may be called from
    any thread. Raises Misconfigured for a `window_ms` outside 5 s to 5 min.
    """

    def __init__(
        self,
        root: Path,
        *,
        clock: Clock,
        place: Place,
        me: ProcessId,
        is_alive: Callable[[ProcessId], bool],
        window_ms: int = WINDOW_MS,
    ) -> None:
        self._root = root
        self._lock = root / ".owner.lock"
        self._record = self._lock / "owner.json"
        self._clock = clock
        self._place = place
        self._is_alive = is_alive
        self._window_ms = check_window(window_ms)
        self._mine = OwnerRecord.of(place, me, secrets.token_hex(16))
        self._obstacle: str | None = "it was never acquired"
        self._descriptor = -1
        self._sight = _Sight(0, 0, 0)
        self._refreshed_at = 0
        self._over = trio.Event()
        self._compromised = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        # A file thread may check while the timer sets the mtime: without this it would see the half-made change.
        self._mutex = threading.Lock()

    async def acquire(self) -> None:
        """Takes the lock; makes the private root when there is none.

        A proven dead owner is replaced at once. One that cannot be proven dead is watched for a whole window on the boot
        clock. Raises OwnershipHeld for a live owner or one that moved while it was watched, OwnershipLost when this object
        was used before, Misconfigured or Corrupt for an unsuitable root.
        """
        if self._token is not None:
            raise OwnershipLost(f"journal {self._root} was acquired before by this object, which never acquires again")
        durable.private_directory(self._root)
        watched, since_ms = None, 0
        while True:
            async with self._guard():
                sight = self._look()
                if sight is None:
                    return self._take()
                found = standing(self._owner(), self._place, self._is_alive)
                if found is Standing.ALIVE:
                    raise self._held()
                if found is Standing.DEAD:
                    return self._displace()
                if watched is None:
                    watched, since_ms = sight, self._clock.boot_ms()
                elif sight != watched:
                    raise self._held()
                elif self._clock.boot_ms() - since_ms >= self._window_ms:
                    return self._displace()
            now = self._clock.boot_ms()
            await self._clock.sleep_until(min(now + self._window_ms // _LOOKS_PER_WINDOW, since_ms + self._window_ms))

    async def refresh_forever(self) -> None:
        """Shows every half window that the owner lives, until the lock is released or lost: the only timer (R79, R80).

        Start it with `trio.lowlevel.spawn_system_task` or in a nursery; it keeps neither open after `release`.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._refresh_on_time, nursery.cancel_scope, name="journal owner refresh")
            await self._over.wait()
            nursery.cancel_scope.cancel()

    async def _refresh_on_time(self, scope: trio.CancelScope) -> None:
        while self.refresh():
            await self._clock.sleep_until(self._refreshed_at + self._window_ms // 2)
        scope.cancel()

    def refresh(self) -> bool:
        """One refresh; False, and compromised for ever, when the lock is no longer this owner's."""
        with self._mutex:
            if not self._still_mine(thoroughly=True):
                return False
            now = self._clock.boot_ms()
            try:
                stamp = max(self._clock.wall_ms() * 1_000_000, self._sight.mtime_ns + _STAMP_STEP_NS)
                # Through the descriptor, so that the lock of a successor is never touched.
                os.utime(self._descriptor, ns=(stamp, stamp))
                self._sight = _Sight.of(os.fstat(self._descriptor))
            except OSError as error:
                if error.errno not in _NOBODY_CAN_WRITE:
                    return True
            self._refreshed_at = now
            return True

    def check(self) -> None:
        """Raises OwnershipLost unless this process owns the journal now. Costs one lstat and one look at the clock."""
        with self._mutex:
            if not self._still_mine(thoroughly=False):
                raise OwnershipLost(f"journal {self._root} is not owned by this process: {self._obstacle}")

    async def wait_compromised(self) -> None:
        """Returns once the lock was lost; never after an orderly release."""
        await self._compromised.wait()

    async def release(self) -> None:
        """Gives the lock up and removes it if it is still this owner's. Idempotent; a compromised owner stays compromised.

        When the directory cannot be removed now it stays: the next owner proves this one dead and takes it.
        """
        if self._descriptor < 0:
            return
        with self._mutex:
            self._obstacle = self._obstacle or "it was released"
        with trio.CancelScope(shield=True), suppress(OwnershipHeld, Corrupt, OSError):
            async with self._guard(_RELEASE_PATIENCE_MS):
                if self._is_there():
                    self._clear()
        os.close(self._descriptor)
        self._descriptor = -1
        self._over.set()

    def _is_there(self) -> bool:
        current = self._look()
        mine = current is not None and (current.device, current.inode) == (self._sight.device, self._sight.inode)
        return mine and self._owner() == self._mine

    def _still_mine(self, *, thoroughly: bool) -> bool:
        """Called with the mutex held. Reading the nonce is left to the refresh: the lstat sees every honest takeover."""
        if self._obstacle is not None:
            return False
        obstacle = None
        if self._clock.boot_ms() - self._refreshed_at >= self._window_ms:
            obstacle = "its refresh came later than the stale window, as after a suspend; start again"
        else:
            try:
                if _Sight.of(self._lock.lstat()) != self._sight:
                    obstacle = "its lock directory was replaced or touched by somebody else; start again"
                elif thoroughly and self._owner() != self._mine:
                    obstacle = "its lock names another owner; start again"
            except OSError as error:
                obstacle = f"its lock directory cannot be seen ({error.strerror}); start again"
        if obstacle is None:
            return True
        self._obstacle = obstacle
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._report_loss)
        return False

    def _report_loss(self) -> None:
        self._compromised.set()
        self._over.set()

    @asynccontextmanager
    async def _guard(self, patience_ms: int = _GUARD_PATIENCE_MS) -> AsyncIterator[None]:
        """Holds the kernel's lock on the guard file. It ends with the process, whatever happens to it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._root / ".owner.guard", flags, 0o600)
        try:
            deadline = self._clock.boot_ms() + patience_ms
            while not _try_lock(descriptor):
                if self._clock.boot_ms() >= deadline:
                    raise OwnershipHeld(f"journal {self._root} is being taken by another process that does not get on: stop it")
                await self._clock.sleep_until(self._clock.boot_ms() + _GUARD_POLL_MS)
            yield
        finally:
            os.close(descriptor)

    def _look(self) -> _Sight | None:
        try:
            status = self._lock.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(status.st_mode):
            raise Corrupt(f"{self._lock} is not a directory: move it away")
        return _Sight.of(status)

    def _owner(self) -> OwnerRecord | None:
        try:
            return OwnerRecord.parse(durable.read_private(self._record, OWNER_BYTES))
        except (FileNotFoundError, Corrupt):
            return None

    def _held(self) -> OwnershipHeld:
        owner = self._owner()
        who = "another process" if owner is None else f"process {owner.pid} of host {owner.host_id}"
        return OwnershipHeld(f"journal {self._root} is owned by {who}: stop that worker first")

    def _displace(self) -> None:
        self._clear()
        self._take()

    def _clear(self) -> None:
        with suppress(FileNotFoundError):
            self._record.unlink()
        try:
            self._lock.rmdir()
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise Corrupt(
                    f"{self._lock} holds files that are not this program's: look at them and move them away"
                ) from None
            raise

    def _take(self) -> None:
        """Called under the guard with no lock in place."""
        self._lock.mkdir(0o700)
        try:
            durable.publish_new(self._record, self._mine.to_json() + b"\n", temporaries=self._root)
            durable.sync_directory(self._root)
            # Held open, so that the inode number cannot be given to a successor's directory.
            self._descriptor = os.open(self._lock, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            with suppress(OSError, Corrupt):
                self._clear()
            raise
        self._token = trio.lowlevel.current_trio_token()
        with self._mutex:
            self._sight = _Sight.of(os.fstat(self._descriptor))
            self._refreshed_at = self._clock.boot_ms()
            self._obstacle = None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
