"""Whether the secrets a task names are stored, asked before it is published: a run that lacks one could never start."""

from msgspec import UNSET

from ..domain.errors import Conflict
from ..domain.revision import SecretReference
from .secret_store import SecretStore
from .task_file import TaskDefinition


def require_secrets(store: SecretStore, definition: TaskDefinition) -> None:
    """Raises Conflict that names the first secret which is not stored. Blocks."""
    execution = definition.execution()
    bundle = execution.environment_bundle_ref
    for text in [*execution.secret_refs(), *([] if bundle is UNSET else [bundle])]:
        reference = SecretReference.parse(text)
        if not store.holds(reference):
            version = "" if reference.version is UNSET else f" --version {reference.version}"
            raise Conflict(
                f"the task {definition.project}/{definition.id} needs the secret {reference.name}, which is not stored; "
                f"store it with qlcontrol secret put {reference.name} --project {reference.project_id}{version}"
            )
