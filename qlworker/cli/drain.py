"""`qlworker drain`: tells the running worker to take no new work, finish what it has, and end."""

import argparse
import os
import signal
import sys
from pathlib import Path

from ..domain.errors import Misconfigured, QlworkerError
from .options import Commands, add_config, load_settings


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("drain", help="let the running worker finish and end", description=__doc__)
    add_config(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Signals the owner of the journal. Returns 1 when no worker runs."""
    settings = load_settings(options)
    pid = signal_owner(settings.state.journal, signal.SIGUSR1)
    if pid is None:
        print(f"qlworker: no worker runs on {settings.state.journal}", file=sys.stderr)
        return 1
    print(f"worker {pid} drains: it takes no new work and ends when its commands are done")
    return 0


def signal_owner(journal: Path, number: signal.Signals) -> int | None:
    """Sends `number` to the process that owns `journal`, and only to it; its pid, or None when it does not run.

    Raises Misconfigured when the journal cannot be read or its owner lives where this process cannot see it.
    """
    from ..adapters.process_table import is_alive, read_place
    from ..domain.ownership import OWNER_BYTES, OwnerRecord

    file = journal / ".owner.lock" / "owner.json"
    try:
        with file.open("rb") as stream:
            owner = OwnerRecord.parse(stream.read(OWNER_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Misconfigured(f"cannot read {file}: {error.strerror}: run this as the worker's user") from error
    if owner is None:
        raise QlworkerError(f"{file} is no record of an owner: stop the worker with its service manager")
    here = read_place(owner.host_id)
    if owner.boot_id != here.boot_id:
        return None
    if owner.place != here:
        raise Misconfigured("the worker runs in another container: run this command in there")
    try:
        descriptor = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise QlworkerError(f"cannot watch process {owner.pid}: {error.strerror}: send it SIGUSR1 by hand") from error
    try:
        # looked at after opening: from here on the descriptor means this process, whoever gets its pid later
        if not is_alive(owner.process):
            return None
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return None
    except PermissionError as error:
        raise Misconfigured(f"cannot signal worker {owner.pid}: run this as root or as the worker's user") from error
    finally:
        os.close(descriptor)
    return owner.pid
