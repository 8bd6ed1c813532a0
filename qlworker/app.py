"""The composition root: the only place that knows concrete classes, opens the nursery and owns the shutdown.

Start: own the journal, audit it, write what receipts decide, audit again, take up what is unsettled, then talk and pull.
Stop (SIGTERM): stop at once, leave running commands alone, release the journal; the next worker adopts them.
Drain (SIGUSR1): take nothing new, finish, sign off.
"""

import os
import resource
import signal
import uuid
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from . import __version__, logs
from .adapters import durable, process_table
from .adapters.clock import SystemClock
from .adapters.credentials import CredentialFiles
from .adapters.identity_file import IdentityFile
from .adapters.journal import FileJournal
from .adapters.machine import LocalMachine
from .adapters.output import OutputFiles
from .adapters.ownership import JournalOwnership
from .adapters.processes import LinuxProcesses
from .adapters.receipts import ReceiptFiles
from .adapters.transport import HttpsLink
from .config import Settings
from .domain.audit import SETTLED_CLASSES, Audit, AuditBudget
from .domain.capabilities import Dialect, describe, has_dialect
from .domain.errors import Corrupt, Misconfigured, OwnershipLost
from .domain.identity import Place
from .domain.receipt import authenticate
from .domain.sweep import SweepTerms
from .flow.acknowledge import Acknowledger
from .flow.cadence import Cadence, CadenceTerms
from .flow.completion import Completion
from .flow.control_plane import ControlPlane
from .flow.delivery import OfferDelivery
from .flow.executions import Executions
from .flow.launch import Launcher, LaunchTerms
from .flow.lease_control import LeaseControl
from .flow.lease_loss import LeaseLossCoordinator
from .flow.materialise import RemoteMaterialiser
from .flow.output import OutputKeeper
from .flow.receiver import Receiver
from .flow.recovery.audit import StartupAuditor
from .flow.recovery.evidence import EvidenceReconciler
from .flow.recovery.lifecycle import JournalLifecycle
from .flow.recovery.retention import Retention
from .flow.recovery.supervisor import ACTIONS_DEFAULT, StartupRecovery
from .flow.recovery.sweeper import Sweeper
from .flow.renewal import CertificateRenewal
from .flow.server_clock import ServerClock
from .flow.session import CapabilitiesText, SessionKeeper, SessionTerms
from .flow.watch import Watcher
from .ports import Log

CLOSE_LIMIT_S: Final = 1.0
"""How long open connections may take to close. procd kills after 5 s; everything else here is quick."""

DONE: Final = 0


class Parts(msgspec.Struct, frozen=True):
    """The worker put together."""

    log: Log
    ownership: JournalOwnership
    lifecycle: JournalLifecycle
    link: HttpsLink
    sessions: SessionKeeper
    executions: Executions
    output: OutputKeeper
    renewal: CertificateRenewal
    cadence: Cadence


def run(settings: Settings) -> int:
    """Runs the worker until a signal or a drain ends it; returns the exit code (design.md §5).

    Raises OwnershipHeld, OwnershipLost or Corrupt when it must not run, Misconfigured or OSError when it cannot; an error of
    one of its tasks comes in an exception group.
    """
    _keep_secrets_in_memory()
    log = logs.configure(settings.log.level, settings.log.format)
    logs.forward_library_logs(log)
    return trio.run(main, settings, log)


def _keep_secrets_in_memory() -> None:
    """No core dump with tokens in it, no file that others can read. Commands may raise their own limit again."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.umask(0o077)


async def main(settings: Settings, log: Log) -> int:
    """The worker's life."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) as signals:
        log.info("worker_starting", version=__version__, worker=settings.worker.id, file=str(settings.file))
        durable.private_directory(settings.state.directory)
        parts = assemble(settings, log)
        try:
            async with parts.lifecycle.hold() as audit:
                return await _run_owned(parts, audit, signals)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_LIMIT_S):
                await parts.link.aclose()
            log.info("worker_stopped")


def assemble(settings: Settings, log: Log) -> Parts:
    """Builds everything; touches no network and makes nothing but a missing installation id and directory of receipts."""
    host_id = _host_id(settings.state.directory)
    place = process_table.read_place(host_id)
    clock = SystemClock(place.boot_id)
    server_clock = ServerClock(clock)
    # One thread for the journal, one for everything that may wait long behind it: threads count as processes on a router.
    journal_files, output_files = trio.CapacityLimiter(1), trio.CapacityLimiter(1)
    ownership = _ownership(settings, clock, place)
    journal = FileJournal(
        settings.state.journal,
        ownership=ownership,
        capacity=settings.state.journal_capacity,
        file_limiter=journal_files,
    )
    outputs = OutputFiles(
        settings.state.output,
        maximum_bytes=settings.output.maximum_bytes,
        minimum_free_bytes=settings.output.minimum_free_bytes,
        file_limiter=output_files,
    )
    receipts = ReceiptFiles(settings.state.receipts, journal_files)
    processes = LinuxProcesses(place)
    link = _link(settings, log)
    control_plane = ControlPlane(link, settings.worker.id, settings.control_plane.secrets_dialect)
    sessions = SessionKeeper(control_plane, journal, clock, server_clock, log, _session_terms(settings))
    lease_control = LeaseControl(control_plane, journal, clock, server_clock, log)
    acknowledger = Acknowledger(control_plane, journal, lease_control, server_clock, log)
    evidence = EvidenceReconciler(receipts, processes, clock, authenticate)
    completion = Completion(control_plane, journal, receipts, outputs, lease_control, server_clock, log)
    grace_ms = settings.execution.stop_grace_ms
    executions = Executions(
        sessions=sessions,
        inbox=journal,
        receipts=receipts,
        acknowledger=acknowledger,
        launcher=Launcher(
            journal,
            processes,
            receipts,
            outputs,
            RemoteMaterialiser(control_plane),
            server_clock,
            log,
            LaunchTerms(directory=str(settings.execution.default_directory), search_path=settings.execution.search_path),
        ),
        watcher=Watcher(
            sessions=sessions,
            inbox=journal,
            processes=processes,
            evidence=evidence,
            acknowledger=acknowledger,
            completion=completion,
            lease_control=lease_control,
            clock=clock,
            server_clock=server_clock,
            log=log,
            stop_grace_ms=grace_ms,
        ),
        lease_control=lease_control,
        lease_loss=LeaseLossCoordinator(journal, processes, server_clock, log, stop_grace_ms=grace_ms),
        clock=clock,
        server_clock=server_clock,
        log=log,
        retry_base_ms=settings.session.pull_backoff_ms,
    )
    output = OutputKeeper(
        control_plane,
        journal,
        outputs,
        executions.active,
        log,
        hasten=executions.hasten,
        is_view_wanted=settings.control_plane.live_output,
    )
    files = settings.credentials
    identity = IdentityFile(settings.worker.id, files.certificate, files.key, journal_files)
    renewal = CertificateRenewal(control_plane, identity, sessions, clock, server_clock, log)
    cadence = Cadence(
        sessions=sessions,
        delivery=OfferDelivery(control_plane, journal, clock, log, backoff_base_ms=settings.session.pull_backoff_ms),
        receiver=Receiver(journal, clock, server_clock),
        executions=executions,
        output=output,
        sweeper=Sweeper(
            Retention(journal, receipts, outputs, server_clock, log, SweepTerms(age_ms=settings.execution.retention_s * 1000)),
            journal,
            server_clock,
            log,
        ),
        renewal=renewal,
        clock=clock,
        log=log,
        terms=CadenceTerms(cadence_ms=settings.session.cadence_ms, drain_timeout_ms=settings.session.drain_timeout_s * 1000),
    )
    capacity = settings.state.journal_capacity

    async def prepare() -> None:
        # From here on, because a large journal on slow flash may take longer to read than the lock lasts. Ends with the lock.
        trio.lowlevel.spawn_system_task(ownership.refresh_forever, name="journal owner refresh")
        _check_abilities(settings, log)
        await journal.open()
        await outputs.open()

    lifecycle = JournalLifecycle(
        ownership,
        StartupAuditor(journal, AuditBudget.for_capacity(capacity)),
        StartupRecovery(
            journal,
            receipts,
            evidence,
            log,
            # A full journal must never be what keeps a worker from starting.
            max_actions=max(ACTIONS_DEFAULT, capacity),
        ),
        prepare=prepare,
    )
    return Parts(log, ownership, lifecycle, link, sessions, executions, output, renewal, cadence)


async def _run_owned(parts: Parts, audit: Audit, signals: AsyncIterator[int]) -> int:
    unfinished = audit.unfinished
    await parts.sessions.load(has_work=bool(unfinished))
    settled = len(audit.of(*SETTLED_CLASSES))
    parts.log.info(
        "journal_read",
        unsettled=len(unfinished),
        settled=settled,
        recovery_required=len(audit.findings) - len(unfinished) - settled,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(_stop_when_compromised, parts), name="journal owner watch")
        nursery.start_soon(parts.output.run, name="output")
        nursery.start_soon(parts.renewal.run, name="certificate renewal")
        await nursery.start(parts.executions.run, name="executions")
        for finding in unfinished:
            parts.executions.resume(finding)
        nursery.start_soon(_run_cadence, parts, nursery.cancel_scope, name="cadence")
        nursery.start_soon(_obey_signals, parts, signals, nursery.cancel_scope, name="signals")
    return DONE


def _check_abilities(settings: Settings, log: Log) -> None:
    """Raises Misconfigured where a journal cannot be kept; says where a power cut may cost the last change (R50, R52).

    A disk that takes no writes now cannot be tried out; that is no reason to leave running commands unwatched.
    """
    try:
        abilities = durable.probe(settings.state.journal)
    except OSError as error:
        log.error("state_unwritable", error=type(error).__name__, number=error.errno)
        return
    if not abilities.is_supported:
        raise Misconfigured(
            f"state.directory = {settings.state.directory}: its file system ({abilities.file_system or 'unknown'}) "
            "is shared or lacks hard links, atomic renames or locks: name a directory on a local file system"
        )
    if not abilities.syncs_directories:
        log.warning("power_cut_may_lose_a_change", file_system=abilities.file_system)


async def _run_cadence(parts: Parts, scope: trio.CancelScope) -> None:
    await parts.cadence.run()
    parts.log.info("worker_drained")
    scope.cancel()


async def _obey_signals(parts: Parts, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for number in signals:
        if number == signal.SIGUSR1:
            parts.log.info("drain_requested")
            parts.cadence.drain()
            continue
        parts.log.info("stop_requested", signal=signal.Signals(number).name)
        scope.cancel()
        return


async def _stop_when_compromised(parts: Parts) -> None:
    await parts.ownership.wait_compromised()
    raise OwnershipLost("the journal's lock was taken away or changed: another worker may own it now, so this one ends")


def _ownership(settings: Settings, clock: SystemClock, place: Place) -> JournalOwnership:
    return JournalOwnership(
        settings.state.journal,
        clock=clock,
        place=place,
        me=process_table.myself(),
        is_alive=process_table.is_alive,
        window_ms=settings.state.ownership_window_s * 1000,
    )


def _link(settings: Settings, log: Log) -> HttpsLink:
    files = settings.credentials
    credentials = CredentialFiles(
        files.certificate,
        files.key,
        files.trust_anchors,
        files.token,
        expected_credential_id=files.expected_credential_id,
        log=log,
    )
    credentials.load()
    return HttpsLink(
        settings.control_plane.origin,
        settings.worker.id,
        credentials,
        request_timeout_s=settings.control_plane.request_timeout_s,
        log=log,
    )


def _session_terms(settings: Settings) -> SessionTerms:
    worker = settings.worker
    facts = LocalMachine(settings.state.directory, settings.execution.search_path).facts()
    wanted = settings.control_plane.capabilities_dialect
    dialects = [Dialect.LATER, Dialect.BASELINE] if wanted == "auto" else [Dialect(wanted)]
    documents = [
        describe(facts, dialect, worker.labels, worker.features) for dialect in dialects if has_dialect(facts, dialect)
    ]
    if not documents:
        raise Misconfigured(
            f"control_plane.capabilities_dialect = {wanted}: it has no name for this box ({facts.machine}): use auto"
        )
    return SessionTerms(
        worker_id=worker.id,
        capabilities=[CapabilitiesText(document.text(), document.digest()) for document in documents],
        max_concurrent_runs=worker.max_concurrent_runs,
        lease_duration_ms=settings.session.lease_s * 1000,
        heartbeat_ms=settings.session.heartbeat_s * 1000,
    )


def _host_id(state: Path) -> str:
    """The machine's id, or one made once for this installation (design.md §3 "the host")."""
    file = state / "installation-id"
    try:
        return process_table.read_host_id(file)
    except Corrupt:
        durable.publish_new(file, uuid.uuid4().hex.encode() + b"\n", temporaries=state)
        return process_table.read_host_id(file)
