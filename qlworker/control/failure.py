"""A request that ends without success: its status and its code, the only thing the worker is told (wire-protocol.md §1.8)."""


class Failure(Exception):
    """Ends a request. `code` is lower snake case, at most 64 characters; `retry_after_s` goes into Retry-After."""

    def __init__(self, status: int, code: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
