"""The worker listener's application (wire-protocol.md §1, control-plane.md §15.3)."""

from typing import Any, Protocol

from .artifact_store import ArtifactStore
from .config import Settings
from .database import Database, Transaction
from .live_output import LiveOutput
from .secret_store import SecretStore


class Principal(Protocol):
    """Whom a credential belongs to."""

    @property
    def worker_id(self) -> str: ...  # noqa: D102

    @property
    def credential_id(self) -> str: ...  # noqa: D102


class Authenticate(Protocol):
    """Tells the principal of an Authorization header (None when it is missing), or None when it is not to be trusted."""

    def __call__(self, tx: Transaction, pepper: bytes, authorization: str | None, /) -> Principal | None: ...  # noqa: D102


def create_ingress(
    database: Database,
    *,
    authenticate: Authenticate,
    pepper: bytes,
    secrets: SecretStore,
    artifacts: ArtifactStore,
    live: LiveOutput,
    settings: Settings,
) -> Any:
    """The ASGI application. SecretStore(directory), ArtifactStore(directory) and LiveOutput(directory) take a Path."""
    raise NotImplementedError
