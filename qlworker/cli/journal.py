"""`qlworker journal`: what the journal holds and why, and how one stuck record is set aside. See docs/operator.md."""

import argparse

from .options import Commands, add_config, add_json, load_settings


def add_to(commands: Commands) -> None:
    """Adds the command and its three actions."""
    parser = commands.add_parser("journal", help="look at the journal, set a stuck record aside", description=__doc__)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="every record and its next step", description=list_records.__doc__)
    add_config(listing)
    add_json(listing)
    listing.set_defaults(execute=list_records)

    showing = actions.add_parser("show", help="the facts of one record", description=show_record.__doc__)
    _add_offer(showing)
    add_config(showing)
    add_json(showing)
    showing.set_defaults(execute=show_record)

    moving = actions.add_parser("quarantine", help="set one record aside", description=quarantine_record.__doc__)
    _add_offer(moving)
    add_config(moving)
    moving.add_argument("--yes", action="store_true", help="do not ask")
    moving.add_argument("--force", action="store_true", help="also a record whose command is seen running")
    moving.set_defaults(execute=quarantine_record)


def _add_offer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("offer", metavar="OFFER", help="offer id, or name of the file as the list shows it")


def list_records(options: argparse.Namespace) -> int:
    """Prints every record as it stood a moment ago, damaged ones too. Changes nothing; a worker may run."""
    from .journal_views import print_list

    print_list(load_settings(options), as_json=options.json)
    return 0


def show_record(options: argparse.Namespace) -> int:
    """Prints the facts of one record, but no token, command or secret. Changes nothing; a worker may run."""
    from .journal_views import print_facts

    print_facts(load_settings(options), options.offer, as_json=options.json)
    return 0


def quarantine_record(options: argparse.Namespace) -> int:
    """Moves one record into the journal's quarantine while no worker runs, after saying what that gives up. Deletes nothing.

    Exits 3 while a worker owns the journal, or when the record's command is seen running, unless that is forced."""
    from .quarantine import quarantine

    return quarantine(load_settings(options), options.offer, is_confirmed=options.yes, is_forced=options.force)
