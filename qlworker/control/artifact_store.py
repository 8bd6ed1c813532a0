"""Where uploaded logs are kept: what the control plane needs of such a place, and how a log is named there.

Write-once and content-addressed: a name holds the digest of the log's identity and of its content, so that two uploads under
one identity never touch each other; which of them counts is decided by the row in `artifacts`. Source: control-plane.md §14.
"""

from typing import Protocol

import msgspec

from ..domain.canonical import sha256_hex


class ArtifactKey(msgspec.Struct, frozen=True):
    """What identifies one log."""

    project_id: str
    run_id: str
    attempt_id: str
    log_artifact_id: str

    def digest(self) -> str:
        """A name for it that is safe in any file system."""
        parts = (self.project_id, self.run_id, self.attempt_id, self.log_artifact_id)
        return sha256_hex(b"qlcontrol/artifact\x00" + b"\x00".join(part.encode() for part in parts))

    def name(self, sha256: str) -> str:
        """Where the content with digest `sha256` lies in a store, two levels deep."""
        digest = self.digest()
        return f"{digest[:2]}/{digest}-{sha256}"


class Upload(Protocol):
    """One log on its way into a store. `discard` it, or `publish` it; neither leaves a temporary file behind. Blocks."""

    def write(self, data: bytes) -> None:
        """Appends `data`. Raises OSError when it cannot be kept."""

    def publish(self) -> str:
        """Makes the content durable under its own name and returns its SHA-256. The same content twice is kept once.

        Raises OSError or Transient when it could not be stored; nothing is stored then.
        """

    def discard(self) -> None:
        """Removes what was not published. May be called after `publish` and twice."""


class ArtifactStore(Protocol):
    """A place that all replicas see. Everything blocks; raises OSError or Transient when the place cannot be used now."""

    def begin(self, key: ArtifactKey) -> Upload:
        """A new upload for `key`."""

    def holds(self, key: ArtifactKey, sha256: str, byte_length: int) -> bool:
        """Whether the stored content really is this one."""

    def read(self, key: ArtifactKey, sha256: str, position: int, size: int) -> bytes:
        """Up to `size` bytes from `position`; b"" behind the end, or when there is no such content."""

    def remove(self, key: ArtifactKey, sha256: str) -> None:
        """Removes a content. One that is gone is no error."""
