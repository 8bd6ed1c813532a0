"""The TLS side of a listener, exchanged while it serves: certificate, authorities and revocation list are read again on demand.

TLS is 1.3 only. On the worker listener every client must show a certificate of the given authorities that is not revoked
(wire-protocol.md §1.1); on the enrolment listener none has one yet. Session tickets are off: a resumed session would not look
at the client's certificate again. What cannot be used leaves the former context in place (control-plane.md §15.3, V113).
"""

import ssl
from collections import OrderedDict
from typing import Any, Final

from ..domain.errors import Misconfigured
from .config import Tls
from .private_files import require_private

CONNECTIONS: Final = 4096


class TlsSide:
    """What a listener takes for its context. Raises Misconfigured when a file cannot be used, Refused for an exposed key."""

    def __init__(self, tls: Tls, *, wants_clients: bool) -> None:
        self._tls = tls
        self._wants_clients = wants_clients
        self._context = self._load()
        self._generation = 0
        self._born: OrderedDict[tuple[str, int], int] = OrderedDict()

    def reload(self) -> None:
        """Reads the files again. Raises as the constructor does, and goes on with the former context then."""
        self._context = self._load()
        self._generation += 1

    def is_outdated(self, client: tuple[str, int]) -> bool:
        """Whether the connection of this peer was made before the last reload: its answer should be its last."""
        born = self._born.setdefault(client, self._generation)
        self._born.move_to_end(client)
        if len(self._born) > CONNECTIONS:
            self._born.popitem(last=False)
        if born == self._generation:
            return False
        del self._born[client]
        return True

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """What a TLS stream asks of a context: a connection under the present one."""
        return self._context.wrap_bio(*arguments, **options)

    def _load(self) -> ssl.SSLContext:
        tls = self._tls
        require_private(tls.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(tls.certificate, tls.key)
        except (OSError, ssl.SSLError) as error:
            raise Misconfigured(f"cannot use {tls.certificate} with {tls.key}: {reason_of(error)}") from error
        if not self._wants_clients:
            return context
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(tls.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise Misconfigured(f"cannot use {tls.client_ca}: {reason_of(error)}") from error
        if tls.revoked.exists():
            try:
                context.load_verify_locations(tls.revoked)
            except (OSError, ssl.SSLError) as error:
                raise Misconfigured(f"cannot use {tls.revoked}: {reason_of(error)}") from error
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
        return context


def reason_of(error: OSError) -> str:
    """Why OpenSSL or the file system refused a file, in words."""
    return (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or "not a certificate or key"
