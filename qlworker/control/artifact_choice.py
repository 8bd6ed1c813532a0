"""Which store the settings name."""

from ..domain.errors import Misconfigured
from .artifact_directory import ArtifactDirectory
from .artifact_store import ArtifactStore
from .config import Settings


def open_store(settings: Settings) -> ArtifactStore:
    """The directory, or the bucket, which must answer. Blocks. Raises Misconfigured without boto3, Transient for no answer."""
    if settings.artifacts.bucket is None:
        return ArtifactDirectory(settings.storage.artifacts)
    try:
        from .artifact_bucket import ArtifactBucket
    except ModuleNotFoundError:
        raise Misconfigured("cannot use artifacts.bucket: boto3 is missing; install qlworker[control,s3]") from None
    store = ArtifactBucket(settings.artifacts.bucket)
    store.check()
    return store
