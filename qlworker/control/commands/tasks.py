"""`qlcontrol task put|list|show` and `qlcontrol secret put`."""

import argparse
import sys
from pathlib import Path

from ...domain.errors import Misconfigured
from ...domain.revision import ExecutionRevision, SecretReference, ShellCommand
from ..operator_api import Published, StoredSecret, TaskView
from ..secret_writer import BUNDLE_BYTES
from ..task_file import TASK_FILE_BYTES, parse_task
from ..terminal import moment, show, show_columns, show_json, show_pairs
from .options import Subparsers, add_config, add_json, operator, task_name


def register(subparsers: Subparsers) -> None:
    """Adds both groups."""
    group = subparsers.add_parser("task", help="publish and show tasks").add_subparsers(metavar="COMMAND", required=True)
    put = group.add_parser("put", help="publish a task file; the same content again changes nothing")
    put.add_argument("file", type=Path, metavar="FILE.toml")
    add_config(put)
    add_json(put)
    put.set_defaults(run=_put)

    listing = group.add_parser("list", help="show all tasks")
    add_config(listing)
    add_json(listing)
    listing.set_defaults(run=_list)

    one = group.add_parser("show", help="show one task")
    one.add_argument("task", type=task_name, metavar="PROJECT/TASK")
    one.add_argument("--revision", type=int, metavar="N", help="an older revision (default: the newest)")
    add_config(one)
    add_json(one)
    one.set_defaults(run=_show)

    secrets = subparsers.add_parser("secret", help="store secrets").add_subparsers(metavar="COMMAND", required=True)
    secret = secrets.add_parser(
        "put",
        help="store a secret from standard input",
        description="Stores what comes on standard input, byte by byte: a line feed at the end belongs to the value.",
    )
    secret.add_argument("name", metavar="NAME")
    secret.add_argument("--project", required=True, metavar="PROJECT")
    secret.add_argument("--version", type=int, metavar="N", help="write version N once, as an environment bundle needs")
    add_config(secret)
    secret.set_defaults(run=_put_secret)


def _put(arguments: argparse.Namespace) -> int:
    try:
        with arguments.file.open("rb") as file:
            data = file.read(TASK_FILE_BYTES + 1)
    except OSError as error:
        raise Misconfigured(f"cannot read {arguments.file}: {error.strerror}") from error
    definition = parse_task(data, str(arguments.file))
    with operator(arguments) as server:
        published = server.call(Published, "PUT", "/tasks", definition)
    if arguments.json:
        show_json(published)
    else:
        state = "published" if published.created else "unchanged"
        show(f"{published.project}/{published.id}  revision {published.revision}  {state}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with operator(arguments) as server:
        tasks = server.call(list[Published], "GET", "/tasks")
    if arguments.json:
        show_json(tasks)
        return 0
    show_columns(
        ("task", "revision", "published"),
        [(f"{each.project}/{each.id}", str(each.revision), moment(each.created_at_ms)) for each in tasks],
    )
    return 0


def _show(arguments: argparse.Namespace) -> int:
    project, task = arguments.task
    with operator(arguments) as server:
        view = server.call(TaskView, "GET", "/task", project=project, id=task, revision=arguments.revision)
    if arguments.json:
        show_json(view)
        return 0
    execution = view.execution
    items = [
        ("task", f"{project}/{task}"),
        ("revision", f"{view.published.revision}, published {moment(view.published.created_at_ms)}"),
        ("digest", view.published.content_digest),
        ("directory", execution.working_directory or "the worker's default"),
        ("timeout", f"{execution.timeout_ms / 1000:g} s" if execution.timeout_ms else "none"),
    ]
    show_pairs(items)
    show_pairs(_environment(execution))
    show("")
    for line in _command(execution):
        show(line)
    return 0


def _environment(execution: ExecutionRevision) -> list[tuple[str, str]]:
    lines = []
    for binding in execution.environment:
        if binding.kind == "public":
            lines.append((f"${binding.name}", repr(binding.value)))
        else:
            name = SecretReference.parse(str(binding.secret_ref)).name
            lines.append((f"${binding.name}", f"the secret {name}"))
    return lines


def _command(execution: ExecutionRevision) -> list[str]:
    command = execution.command
    if isinstance(command, ShellCommand):
        return [f"{command.shell or '/bin/sh'}:", *(f"  {line}" for line in command.command.splitlines())]
    return [f"{command.file}:", *(f"  {argument!r}" for argument in command.args)]


def _put_secret(arguments: argparse.Namespace) -> int:
    value = sys.stdin.buffer.read(BUNDLE_BYTES + 1)
    with operator(arguments) as server:
        stored = server.call(
            StoredSecret,
            "PUT",
            "/secrets",
            value,
            project=arguments.project,
            name=arguments.name,
            version=arguments.version,
        )
    show(f"{arguments.project}/{arguments.name}  {'stored' if stored.changed else 'unchanged'}")
    return 0
