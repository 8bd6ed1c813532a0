"""Gets a command's variables: public ones from the revision, secret ones from the control plane, in memory only (R395).

Source: wire-protocol.md §6, R148, R393 to R395. Asking is repeatable under the same fence, so a lost answer costs nothing.
"""

from typing import Protocol

import msgspec
from msgspec import UNSET

from ..domain.environment import Variable
from ..domain.errors import Refused
from ..domain.offer import Offer
from ..wire.secrets import EnvironmentBundle
from .control_plane import ControlPlane


class Materialised(msgspec.Struct, frozen=True):
    """Variables in the revision's order, and those of its bundle. The receiver of this matches it against the revision."""

    bindings: list[Variable]
    bundle: list[Variable]


class Materialiser(Protocol):
    """Whoever makes variables of bindings. The launch does not trust it."""

    async def materialise(self, offer: Offer) -> Materialised:
        """The variables of `offer`. Raises Refused when they cannot be had, Transient when they may be had later."""


class RemoteMaterialiser:
    """Secrets from the control plane's secret delivery."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane

    async def materialise(self, offer: Offer) -> Materialised:
        """Asks only when there is something secret (wire-protocol §6.1)."""
        revision = offer.execution_revision
        secrets: dict[str, str] = {}
        bundle_text: str | None = None
        if revision.secret_refs() or revision.environment_bundle_ref is not UNSET:
            secrets, bundle_text = await self._control_plane.secrets(offer)
        bindings: list[Variable] = []
        for binding in revision.environment:
            if binding.value is not UNSET:
                bindings.append(Variable(binding.name, binding.value))
            elif binding.secret_ref is not UNSET and binding.secret_ref in secrets:
                bindings.append(Variable(binding.name, secrets[binding.secret_ref]))
            else:
                raise Refused(f"no secret was delivered for the variable {binding.name}")
        bundle = [] if bundle_text is None else EnvironmentBundle.parse(bundle_text).entries
        return Materialised(bindings, [Variable(entry.name, entry.value) for entry in bundle])
