"""Ending a command's session: TERM, grace, KILL, and a look whether anything is left (wire-protocol.md §11.6, design.md §3).

A session is everything below its leader that has not made a session of its own. The launcher stands outside and is never
signalled: it has a receipt to publish.
"""

import signal
from typing import Final

import trio

from ..domain.identity import ProcessId
from ..ports import StopResult
from .pidfd import HeldProcess
from .process_table import ProcessStat, every_stat, read_stat

_SWEEP_AGAIN_S: Final = 0.1


def session_members(leader: ProcessId) -> list[ProcessStat]:
    """The living processes of the session that `leader` leads or led, oldest first.

    The kernel gives a pid to nobody else while it is a session's number. So a member is ours when nobody else holds the pid
    and it is not older than the leader. What that cannot tell apart, once leader and session were both gone, is a later
    session whose leader got the same pid and has died as well.
    """
    holder = read_stat(leader.pid)
    if holder is not None and holder.process != leader:
        return []
    members = [
        stat
        for stat in every_stat()
        if stat.session == leader.pid and not stat.is_dead and int(stat.process.start_ticks) >= int(leader.start_ticks)
    ]
    return sorted(members, key=lambda stat: int(stat.process.start_ticks))


async def stop_session(leader: ProcessId, grace_ms: int, kill_wait_ms: int) -> StopResult:
    """Ends the session of `leader`: at most `grace_ms` after TERM, then at most `kill_wait_ms` with KILL.

    Raises OSError when the process table cannot be read.
    """
    if not session_members(leader):
        return StopResult.ALREADY_EXITED
    _ask(leader)
    with trio.move_on_after(grace_ms / 1000):
        while members := session_members(leader):
            await _gone(members[0])
        return StopResult.STOPPED
    with trio.move_on_after(kill_wait_ms / 1000):
        # One sweep is not enough: what was forked after the list was made is in the next one (R205: nothing is derived
        # from hope).
        while members := session_members(leader):
            for member in members:
                _kill(member)
            with trio.move_on_after(_SWEEP_AGAIN_S):
                await _gone(members[0])
        return StopResult.STOPPED
    return StopResult.TIMED_OUT if session_members(leader) else StopResult.STOPPED


def _ask(leader: ProcessId) -> None:
    """TERM, and CONT so that a stopped process can follow it."""
    held = HeldProcess.open(leader)
    if held is not None:
        with held:
            held.send_to_group(signal.SIGTERM)
            held.send_to_group(signal.SIGCONT)
        return
    # Without its leader the group has no proven owner: every member is asked by itself.
    for member in session_members(leader):
        if each := HeldProcess.open(member.process):
            with each:
                each.send(signal.SIGTERM)
                each.send(signal.SIGCONT)


def _kill(member: ProcessStat) -> None:
    """KILL to a process, and to its whole group at once when it leads one: nobody can fork away from that."""
    if held := HeldProcess.open(member.process):
        with held:
            if member.group == member.process.pid:
                held.send_to_group(signal.SIGKILL)
            held.send(signal.SIGKILL)


async def _gone(member: ProcessStat) -> None:
    held = HeldProcess.open(member.process)
    if held is None:
        await trio.lowlevel.checkpoint()
        return
    with held:
        await held.wait()
