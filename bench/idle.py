"""What an idle worker costs: `python bench/idle.py`. Starts the demonstration's pair over mutual TLS and reads /proc."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import qlworker


def main() -> int:
    """Prints one line per figure, and what it was measured on."""
    pair = subprocess.Popen(
        [sys.executable, "-m", "qlworker.control.demo", "--idle"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert pair.stdout is not None and pair.stdin is not None
    try:
        pid = next((line.split("=")[1].strip() for line in pair.stdout if line.startswith("worker_pid=")), None)
        if pid is None:
            print("the pair did not start", file=sys.stderr)
            return 1
        rollup = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:] if ":" in line
        )
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    finally:
        pair.stdin.close()
        pair.wait()
    print(
        f"qlworker {qlworker.__version__}, Python {platform.python_version()}, {os.uname().machine}, Linux {os.uname().release}"
    )
    for name, value in (("rss", rollup["Rss"]), ("pss", rollup["Pss"]), ("private dirty", rollup["Private_Dirty"])):
        print(f"{name:14} {int(value.split()[0]) / 1024:6.1f} MiB")
    print(f"{'threads':14} {status['Threads'].strip():>6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
