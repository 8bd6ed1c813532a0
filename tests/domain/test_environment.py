"""Variables against their revision."""

import pytest
from msgspec import UNSET

from qlworker.domain.canonical import b64u, js_json
from qlworker.domain.environment import Variable, documented_variables, match_revision
from qlworker.domain.revision import Binding, ExecutionRevision
from tests.builders import make_offer, make_revision

REFERENCE = "qlsecret:v1:" + b64u(js_json({"projectId": "project-1", "name": "key"}))
BUNDLE = "qlsecret:v1:" + b64u(js_json({"projectId": "project-1", "name": "bundle", "version": 1}))
SECRET = "do-not-show-me"


def revision(*, bundle: bool = False) -> ExecutionRevision:
    bindings = [
        Binding(name="A", kind="public", value="1"),
        Binding(name="K", kind="secret", secret_ref=REFERENCE),
        Binding(name="Z", kind="public", value=""),
    ]
    return make_revision(environment=bindings, environment_bundle_ref=BUNDLE if bundle else UNSET)


GOOD = [Variable("A", "1"), Variable("K", SECRET), Variable("Z", "")]


@pytest.mark.req("R393", "R394")
def test_exactly_the_revisions_variables_pass() -> None:
    assert match_revision(revision(), GOOD, []) == {"A": "1", "K": SECRET, "Z": ""}


BAD = {
    "missing": GOOD[:2],
    "extra": [*GOOD, Variable("MORE", "1")],
    "renamed": [Variable("a", "1"), *GOOD[1:]],
    "twice": [GOOD[0], *GOOD],
    "out-of-order": GOOD[::-1],
    "byte": [Variable("A", "2"), *GOOD[1:]],
    "empty-became-space": [*GOOD[:2], Variable("Z", " ")],
    "nul": [GOOD[0], Variable("K", "a\x00b"), GOOD[2]],
    "too-large": [GOOD[0], Variable("K", "x" * 70_000), GOOD[2]],
}


@pytest.mark.req("R148", "R393", "R394", "R401")
@pytest.mark.parametrize("name", BAD)
def test_every_drift_is_refused_and_no_value_is_quoted(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        match_revision(revision(), BAD[name], [])

    assert SECRET not in str(caught.value)
    assert "x" * 100 not in str(caught.value)


def test_a_bundle_adds_to_the_variables() -> None:
    assert match_revision(revision(bundle=True), GOOD, [Variable("B", "2")])["B"] == "2"


@pytest.mark.parametrize("name", ["A", "K"])
def test_a_bundle_repeats_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="repeat"):
        match_revision(revision(bundle=True), GOOD, [Variable(name, SECRET)])
    with pytest.raises(ValueError, match="repeat"):
        match_revision(revision(bundle=True), GOOD, [Variable("B", "1"), Variable("B", "1")])


def test_a_bundle_nobody_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="bundle"):
        match_revision(revision(), GOOD, [Variable("B", "2")])


def test_the_count_is_bounded() -> None:
    many = [Variable(f"B{number}", "") for number in range(254)]

    with pytest.raises(ValueError, match="256"):
        match_revision(revision(bundle=True), GOOD, many)
    assert len(match_revision(revision(bundle=True), GOOD, many[:253])) == 256


@pytest.mark.req("R395", "R402")
def test_what_is_printed_of_a_variable_has_no_value() -> None:
    assert SECRET not in repr(Variable("K", SECRET)) + str([Variable("K", SECRET)])


def test_a_command_knows_who_it_is() -> None:
    assert documented_variables(make_offer()) == {
        "QL_PROJECT_ID": "project-1",
        "QL_TASK_ID": "task-1",
        "QL_RUN_ID": "run-1",
        "QL_ATTEMPT_ID": "attempt-1",
        "QL_ATTEMPT_NUMBER": "1",
        "QL_WORKER_ID": "edge-1",
    }
