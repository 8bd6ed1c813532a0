"""Decisions that need a record have one."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.req("R382")
def test_encryption_and_backup_of_the_journal_have_a_decision_record() -> None:
    text = (DOCS / "journal-security.md").read_text("utf-8")

    assert "not encrypted at rest" in text
    for title in ("## Decision", "## Why no encryption", "## What protects it", "## What must not be backed up"):
        assert title in text
