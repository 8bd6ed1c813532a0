"""Log upload and completion (wire-protocol.md §8), and the live output extension."""

from typing import ClassVar, Final, Literal

from ..domain.document import Document
from ..domain.text import INT31, check_digest, check_integer, check_log_artifact_id
from .fence import LeaseFence

UPLOAD_SCHEMA: Final = "qinglong/remote-worker-artifact-upload@v1"
COMPLETION_SCHEMA: Final = "qinglong/remote-worker-completion@v1"
OUTPUT_SCHEMA: Final = "qlworker/remote-worker-output@v1"
ARTIFACT_BYTES: Final = 64 * 1024 * 1024
UPLOAD_HEADER_BYTES: Final = 4 * 1024
OUTPUT_CHUNK_BYTES: Final = 32 * 1024


class UploadHeader(LeaseFence, frozen=True, kw_only=True):
    """The header in front of an artifact's bytes. `truncated` is null when it is not known (§8.2)."""

    SCHEMA: ClassVar[str] = UPLOAD_SCHEMA

    log_artifact_id: str
    byte_length: int
    truncated: bool | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_log_artifact_id(self.log_artifact_id)
        check_integer(self.byte_length, "byteLength", 0, ARTIFACT_BYTES)

    def preamble(self) -> bytes:
        """The header's length as 4 bytes, big-endian, and the header."""
        header = self.to_json()
        return len(header).to_bytes(4, "big") + header


class UploadResponse(Document, frozen=True, kw_only=True):
    """What the store measured."""

    schema: Literal["qinglong/remote-worker-artifact-upload@v1"]
    status: Literal["stored", "already_stored"]
    project_id: str
    run_id: str
    attempt_id: str
    log_artifact_id: str
    byte_length: int
    sha256: str
    truncated: bool | None

    def __post_init__(self) -> None:
        check_log_artifact_id(self.log_artifact_id)
        check_integer(self.byte_length, "byteLength", 0, ARTIFACT_BYTES)
        check_digest(self.sha256, "sha256")


class CompletionResult(Document, frozen=True, kw_only=True):
    """How the command ended. Succeeded if and only if the exit code is 0 (§8.3)."""

    outcome: Literal["succeeded", "failed"]
    started_at_ms: int
    finished_at_ms: int
    exit_code: int

    def __post_init__(self) -> None:
        check_integer(self.started_at_ms, "result.startedAtMs")
        check_integer(self.finished_at_ms, "result.finishedAtMs", self.started_at_ms)
        check_integer(self.exit_code, "result.exitCode", 0, 255)
        if (self.exit_code == 0) is not (self.outcome == "succeeded"):
            raise ValueError("result.outcome must be succeeded exactly for exit code 0")


class Artifact(Document, frozen=True, kw_only=True):
    """The stored log."""

    log_artifact_id: str
    byte_length: int
    sha256: str
    truncated: bool | None

    def __post_init__(self) -> None:
        check_log_artifact_id(self.log_artifact_id)
        check_integer(self.byte_length, "artifact.byteLength", 0, ARTIFACT_BYTES)
        check_digest(self.sha256, "artifact.sha256")


class CompletionRequest(LeaseFence, frozen=True, kw_only=True):
    """The end of one attempt. Only the digest of the callback token crosses the wire."""

    SCHEMA: ClassVar[str] = COMPLETION_SCHEMA

    callback_sequence: int
    callback_token_digest: str
    result: CompletionResult
    artifact: Artifact

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self.callback_sequence, "callbackSequence", 1, INT31)
        check_digest(self.callback_token_digest, "callbackTokenDigest")


class CompletionResponse(Document, frozen=True, kw_only=True):
    """`already_completed` is the exact repeat; `already_terminal` means somebody else ended it (control-plane.md D3)."""

    schema: Literal["qinglong/remote-worker-completion@v1"]
    status: Literal["applied", "already_completed", "already_terminal"]
    run_id: str
    attempt_id: str
    callback_sequence: int

    def __post_init__(self) -> None:
        check_integer(self.callback_sequence, "callbackSequence", 1, INT31)


class OutputRequest(LeaseFence, frozen=True, kw_only=True):
    """A chunk of live output, at most 32 KiB, from stream position `offset`. Bytes, so base64 on the wire."""

    SCHEMA: ClassVar[str] = OUTPUT_SCHEMA

    log_artifact_id: str
    offset: int
    data: bytes

    def __post_init__(self) -> None:
        super().__post_init__()
        check_log_artifact_id(self.log_artifact_id)
        check_integer(self.offset, "offset")
        if len(self.data) > OUTPUT_CHUNK_BYTES:
            raise ValueError(f"data must be at most {OUTPUT_CHUNK_BYTES} bytes")


class OutputResponse(Document, frozen=True, kw_only=True):
    """How far the live view reaches now, and a hint that `lease-control` has a stop to tell: it only saves waiting, the stop
    itself comes by lease-control."""

    schema: Literal["qlworker/remote-worker-output@v1"]
    next_offset: int
    stop_requested: bool

    def __post_init__(self) -> None:
        check_integer(self.next_offset, "nextOffset")
