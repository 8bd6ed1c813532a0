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


TOPICS = {
    "transition": "domain/test_record.py::test_only_the_transitions_of_the_vectors_are_legal",
    "paging": "contract/test_inbox.py::test_pages_go_through_every_record_in_order_once",
    "digest": "flow/test_completion.py::test_gap_13_the_digest_is_taken_in_the_order_received",
    "order of acknowledgements": "flow/test_one_run.py::test_the_steps_of_one_run_come_in_exactly_this_order",
    "refusal": "flow/test_launch.py::test_a_rejection_is_on_disk_before_it_is_reported_and_is_reported_once",
    "ambiguous spawn": (
        "flow/test_launch.py::test_an_answer_of_the_executor_that_proves_nothing_is_unknown_and_never_a_start_failure"
    ),
    "restart": "flow/test_one_run.py::test_a_worker_that_ends_at_any_step_leaves_a_run_that_is_started_once_and_ends_right",
    "environment drift": (
        "flow/test_launch.py::test_variables_that_differ_from_the_revision_end_before_the_barrier_and_the_spawn"
    ),
}


@pytest.mark.req("R554")
@pytest.mark.parametrize("topic", TOPICS)
def test_each_topic_of_the_delivery_decision_has_its_test(topic: str) -> None:
    file, _, name = TOPICS[topic].partition("::")

    assert f"def {name}(" in (Path(__file__).parent / file).read_text("utf-8")
