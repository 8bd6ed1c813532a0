"""`python -m tests.crash [--rounds N] [--seed S] [--no-steps]`: kills at every step, then at random; one line at the end."""

import argparse
import secrets
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from .faults import cases
from .outcome import Tally
from .rounds import run_rounds
from .steps import run_steps


def main() -> int:
    parser = argparse.ArgumentParser(prog="make crash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="random rounds")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000), help="what the rounds are made from")
    parser.add_argument("--no-steps", action="store_true", help="random rounds alone")
    parser.add_argument("--verbose", action="store_true", help="a line for every step and round")
    options = parser.parse_args()
    started = time.monotonic()
    out = sys.stdout  # enrolments catch what is printed elsewhere meanwhile
    print(f"seed {options.seed}; the same plan again: make crash N={options.rounds} SEED={options.seed}", flush=True)
    tally = Tally()

    def tell(line: str) -> None:
        if options.verbose:
            print(line, file=out, flush=True)

    with tempfile.TemporaryDirectory(prefix="crash-") as directory:
        if not options.no_steps:
            tally.add(run_steps(Path(directory) / "steps", cases(), say=tell))
        if options.rounds:
            tally.add(
                run_rounds(Path(directory) / "rounds", options.seed, options.rounds, say=tell, warn=partial(print, file=out))
            )
    for note in tally.notes:
        print(note, file=sys.stderr)
    print(tally.line(time.monotonic() - started), flush=True)
    return 0 if tally.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
