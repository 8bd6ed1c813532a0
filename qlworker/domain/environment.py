"""The variables a command gets, matched item by item against the immutable revision (R148, R393, R394).

Source: wire-protocol.md §6.5. Values are secret until proven public: nothing here puts one into an error text.
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from .offer import Offer
from .revision import ENVIRONMENT_BYTES, ENVIRONMENT_ITEMS, ExecutionRevision


class Variable(msgspec.Struct, frozen=True):
    """One variable with its value. Its repr hides the value."""

    name: str
    value: str

    def __repr__(self) -> str:
        return f"<Variable {self.name}>"


def match_revision(revision: ExecutionRevision, bindings: Sequence[Variable], bundle: Sequence[Variable]) -> dict[str, str]:
    """The environment made of the materialised `bindings` and bundle entries.

    Raises ValueError when a binding is missing, added, renamed or out of order, a public value differs by a byte, a bundle
    repeats a binding or comes without being asked for, or the whole is above 256 variables or 64 KiB.
    """
    if [variable.name for variable in bindings] != [binding.name for binding in revision.environment]:
        raise ValueError("the materialised environment must have the revision's names, all and no others")
    for variable, binding in zip(bindings, revision.environment, strict=True):
        if binding.value is not UNSET and variable.value != binding.value:
            raise ValueError(f"the public variable {binding.name} must have the revision's value")
    if bundle and revision.environment_bundle_ref is UNSET:
        raise ValueError("a bundle must only come where the revision refers to one")
    everything = [*bindings, *bundle]
    environment = {variable.name: variable.value for variable in everything}
    if len(environment) != len(everything):
        raise ValueError("a bundle must not repeat a name")
    size = sum(len(name.encode()) + len(value.encode()) for name, value in environment.items())
    if len(environment) > ENVIRONMENT_ITEMS or size > ENVIRONMENT_BYTES:
        raise ValueError(f"an environment must be at most {ENVIRONMENT_ITEMS} variables and {ENVIRONMENT_BYTES} bytes")
    if any("\x00" in value for value in environment.values()):
        raise ValueError("an environment value must not contain NUL")
    return environment


def documented_variables(offer: Offer) -> Mapping[str, str]:
    """What every command may know of itself. A variable of the revision with the same name wins."""
    candidate = offer.candidate
    return {
        "QL_PROJECT_ID": candidate.project_id,
        "QL_TASK_ID": candidate.task_id,
        "QL_RUN_ID": candidate.run_id,
        "QL_ATTEMPT_ID": candidate.attempt_id,
        "QL_ATTEMPT_NUMBER": str(candidate.attempt_number),
        "QL_WORKER_ID": offer.worker.worker_id,
    }
