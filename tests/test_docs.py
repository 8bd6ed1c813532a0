"""Pages that are printed from the code agree with it."""

import runpy
from pathlib import Path

from qlworker.control.openapi import text

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_states_is_the_one_the_transition_table_prints() -> None:
    printed = runpy.run_path(str(DOCS / "print_states.py"))["states_page"]()

    assert printed == (DOCS / "states.md").read_text("utf-8")


def test_the_openapi_document_is_the_one_the_table_of_operations_prints() -> None:
    assert text() == (DOCS / "openapi.json").read_text("utf-8")
