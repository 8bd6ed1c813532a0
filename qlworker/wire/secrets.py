"""Secret delivery in both dialects, and environment bundles (wire-protocol.md §6)."""

from typing import Any, ClassVar, Final, Literal, Self

from msgspec import UNSET

from ..domain.canonical import utf16_key
from ..domain.document import Document
from ..domain.errors import Refused
from ..domain.offer import Offer
from ..domain.revision import ENVIRONMENT_BYTES, ENVIRONMENT_ITEMS, SecretReference, check_environment_name
from ..domain.text import check_digest, check_dispatch_id, check_text
from .codec import decode
from .fence import LeaseFence

SECRETS_V1: Final = "qinglong/remote-secret-delivery@v1"
SECRETS_V2: Final = "qinglong/remote-secret-delivery@v2"
BUNDLE_SCHEMA: Final = "qinglong/environment-bundle@v1"
REFERENCES: Final = 64
VALUE_BYTES: Final = 16 * 1024
VALUES_BYTES: Final = 64 * 1024
BUNDLE_BYTES: Final = 96 * 1024


class _SecretRequest(LeaseFence, frozen=True, kw_only=True):
    task_id: str
    task_revision: str
    execution_digest: str
    secret_refs: list[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dispatch_id(self.task_id, "taskId")
        check_dispatch_id(self.task_revision, "taskRevision")
        check_digest(self.execution_digest, "executionDigest")
        if len(self.secret_refs) > REFERENCES or len(set(self.secret_refs)) != len(self.secret_refs):
            raise ValueError(f"secretRefs must be at most {REFERENCES}, without repeats")
        for reference in self.secret_refs:
            SecretReference.parse(reference)

    @classmethod
    def of(cls, offer: Offer, **members: Any) -> Self:
        """The request for everything `offer` refers to."""
        revision = offer.execution_revision
        return super().of(
            offer,
            task_id=revision.task_id,
            task_revision=revision.task_revision,
            execution_digest=offer.execution_digest,
            secret_refs=revision.secret_refs(),
            **members,
        )


class SecretRequestV1(_SecretRequest, frozen=True, kw_only=True):
    """The baseline's request: at least one reference."""

    SCHEMA: ClassVar[str] = SECRETS_V1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.secret_refs:
            raise ValueError("secretRefs must have at least one entry")


class SecretRequestV2(_SecretRequest, frozen=True, kw_only=True):
    """The later request: references and at most one environment bundle, at least one of either."""

    SCHEMA: ClassVar[str] = SECRETS_V2

    environment_bundle_refs: list[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        bundles = self.environment_bundle_refs
        if len(bundles) > 1 or not self.secret_refs + bundles or set(bundles) & set(self.secret_refs):
            raise ValueError("a request must have a reference, at most one bundle, and no overlap")
        for reference in bundles:
            SecretReference.parse(reference)

    @classmethod
    def of(cls, offer: Offer, **members: Any) -> Self:
        """The request for everything `offer` refers to, its bundle included."""
        bundle = offer.execution_revision.environment_bundle_ref
        return super().of(offer, environment_bundle_refs=[] if bundle is UNSET else [bundle], **members)


class SecretValue(Document, frozen=True, kw_only=True):
    """One delivered value. Its repr hides it."""

    secret_ref: str
    value: str

    def __repr__(self) -> str:
        return "<SecretValue>"


class _SecretResponse(Document, frozen=True, kw_only=True):
    run_id: str
    attempt_id: str
    offer_id: str
    execution_digest: str
    values: list[SecretValue]

    def __post_init__(self) -> None:
        for each in self.values:
            check_text(each.value, "secret value", maximum=VALUE_BYTES, controls=True)
        if sum(len(each.value.encode()) for each in self.values) > VALUES_BYTES:
            raise ValueError(f"secret values must be at most {VALUES_BYTES} bytes together")


class SecretResponseV1(_SecretResponse, frozen=True, kw_only=True):
    """The baseline's answer."""

    schema: Literal["qinglong/remote-secret-delivery@v1"]


class SecretResponseV2(_SecretResponse, frozen=True, kw_only=True):
    """The later answer, with bundles."""

    schema: Literal["qinglong/remote-secret-delivery@v2"]
    environment_bundles: list[SecretValue]

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in self.environment_bundles:
            check_text(each.value, "environment bundle", minimum=2, maximum=BUNDLE_BYTES, controls=True)


class BundleEntry(Document, frozen=True, kw_only=True):
    """One variable of a bundle."""

    name: str
    value: str

    def __post_init__(self) -> None:
        check_environment_name(self.name)
        check_text(self.value, "bundle value", maximum=VALUE_BYTES, controls=True)


class EnvironmentBundle(Document, frozen=True, kw_only=True):
    """A stored set of variables, 1 to 256 with unique names, in UTF-16 code unit order (§6.5)."""

    schema: Literal["qinglong/environment-bundle@v1"]
    entries: list[BundleEntry]

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if not 1 <= len(names) <= ENVIRONMENT_ITEMS or len(set(names)) != len(names):
            raise ValueError(f"a bundle must have 1 to {ENVIRONMENT_ITEMS} entries with unique names")
        if sum(len(entry.name.encode()) + len(entry.value.encode()) for entry in self.entries) > ENVIRONMENT_BYTES:
            raise ValueError(f"a bundle must be at most {ENVIRONMENT_BYTES} bytes")

    def canonical(self) -> "EnvironmentBundle":
        """The same bundle, sorted."""
        return EnvironmentBundle(schema=BUNDLE_SCHEMA, entries=sorted(self.entries, key=lambda entry: utf16_key(entry.name)))

    @classmethod
    def parse(cls, text: str) -> "EnvironmentBundle":
        """The bundle in `text`, at most 96 KiB, sorted. Raises Refused."""
        if len(text.encode()) > BUNDLE_BYTES:
            raise Refused(f"an environment bundle must be at most {BUNDLE_BYTES} bytes")
        bundle: EnvironmentBundle = decode(text.encode(), cls)
        return bundle.canonical()
