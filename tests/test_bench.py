"""The measuring commands measure; what they find is not judged here."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.req("R50", "R51")
def test_the_device_report_has_a_row_for_every_directory_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "bench/filesystems.py", str(tmp_path), "/dev/shm"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    heading, rule, first, second = done.stdout.splitlines()
    assert heading.count("|") == rule.count("|") == first.count("|") == second.count("|")
    assert "tmpfs" in second


def test_the_device_report_on_record_has_the_columns_the_command_prints(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "bench/filesystems.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[0] in (ROOT / "docs/filesystems.md").read_text("utf-8").splitlines()
