"""Asking the signer: a process of its own per signature, one at a time, bounded in time and output (signer.py)."""

import subprocess
import sys
from typing import Final

import msgspec
import trio

from ..domain.errors import Refused, Transient
from .config import Authority
from .logs import Log
from .signer import SignedAnswer, SigningOrder

SIGNING_S: Final = 30
"""How long a signature may take, and how much longer than others a request for one."""


class Signing:
    """Signs with the authority whose files are named, if its key is on this host."""

    def __init__(self, authority: Authority, log: Log) -> None:
        self._authority = authority
        self._log = log
        self._turn = trio.CapacityLimiter(1)

    @property
    def is_possible(self) -> bool:
        """Whether the authority's key is here; it may be kept elsewhere, and then nothing is signed online."""
        return self._authority.key.is_file()

    async def worker(self, worker_id: str, request: str, days: int) -> SignedAnswer:
        """A certificate for a worker's request (PEM). Raises Refused for a request that is not to be signed, Transient when
        nothing can be signed now."""
        return await self._ask(
            SigningOrder(
                kind="worker",
                certificate=str(self._authority.certificate),
                key=str(self._authority.key),
                worker_id=worker_id,
                request=request,
                days=days,
            )
        )

    async def revocations(self, serials: list[str], days: int) -> bytes:
        """The list of revoked certificates, PEM. Raises as `worker` does."""
        order = SigningOrder(
            kind="revocations",
            certificate=str(self._authority.certificate),
            key=str(self._authority.key),
            days=days,
            serials=serials,
        )
        return (await self._ask(order)).pem.encode()

    async def _ask(self, order: SigningOrder) -> SignedAnswer:
        if not self.is_possible:
            raise Transient("cannot sign here: the authority's key is not on this host")
        async with self._turn:
            with trio.move_on_after(SIGNING_S):
                done = await trio.run_process(
                    [sys.executable, "-m", "qlworker.control.signer"],
                    stdin=msgspec.json.encode(order),
                    capture_stdout=True,
                    capture_stderr=True,
                    check=False,
                )
                return self._answer(done)
        raise Transient(f"the signer did not answer within {SIGNING_S} s")

    def _answer(self, done: "subprocess.CompletedProcess[bytes]") -> SignedAnswer:
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=SignedAnswer)
        reason = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:300]
        if done.returncode == 1:
            raise Refused(reason)
        self._log.error("signer_failed", code=done.returncode, reason=reason)
        raise Transient(f"the signer ended with {done.returncode}")
