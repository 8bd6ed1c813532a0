"""Prints docs/states.md from the transition table: `python docs/print_states.py > docs/states.md`. A test compares the two."""

import sys

from qlworker.domain.record import SETTLED, TRANSITIONS, State


def states_page() -> str:
    """The page, as Markdown with a Mermaid diagram and a table."""
    lines = [
        "# The states of an inbox record",
        "",
        "Printed from `TRANSITIONS` in `qlworker/domain/record.py`. A state is also rewritten as itself, under a newer lease.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        f"    [*] --> {State.ACCEPTED}",
    ]
    lines += [f"    {source} --> {target}: {event}" for (source, event), target in TRANSITIONS.items()]
    lines += [f"    {state} --> [*]" for state in State if state in SETTLED]
    lines += ["```", "", "| from | event | to |", "|---|---|---|"]
    lines += [f"| {source} | {event} | {target} |" for (source, event), target in TRANSITIONS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(states_page())
