"""The one tree of errors. A class exists only because some code acts on it.

Texts are lower case, name the thing, the rule and the remedy, and never carry a token, a secret or a command.
"""


class QlworkerError(Exception):
    """Base of every error this program raises on purpose."""


class Misconfigured(QlworkerError):
    """The operator's input is wrong. The program says so in one line and exits 2."""


class Refused(QlworkerError):
    """Input from the control plane breaks a rule of the contract. Nothing was written and nothing is retried."""


class Conflict(QlworkerError):
    """The stored record does not allow this change: wrong revision, wrong transition, or another authority."""


class CapacityExceeded(QlworkerError):
    """The journal is full. Nothing is evicted to make room (R40, R41)."""


class Transient(QlworkerError):
    """The control plane could not be reached or could not answer. The same request may be sent again.

    `retry_after_s` is the wait the server asked for, in seconds, or None.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Malformed(QlworkerError):
    """The control plane refused the form of a request (status 400): another dialect, or a bug."""


class Unsupported(QlworkerError):
    """The control plane does not know this operation (status 404)."""


class Unauthorized(QlworkerError):
    """The credential was rejected (status 401 or 403). Pulling pauses, the heartbeat goes on (wire-protocol §2.7)."""


class Fenced(QlworkerError):
    """Somebody else owns this now, or the authority is gone (status 409)."""


class OwnershipLost(QlworkerError):
    """The journal is not, or no longer, owned by this process. Every operation fails closed (R85)."""


class OwnershipHeld(QlworkerError):
    """Another process owns the journal, or cannot be proven dead. The program exits 3."""


class Corrupt(QlworkerError):
    """Local state is damaged or unsafe. It is left as it is and the program exits 3."""
