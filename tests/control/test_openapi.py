"""The operator listener's OpenAPI document is valid, complete, and what the listener does."""

import re
from typing import Any

import msgspec
import pytest
from openapi_spec_validator import validate

from qlworker.control.openapi import document
from qlworker.control.operator import _Operator
from qlworker.control.operator_operations import OPERATIONS, Operation


def test_the_document_is_valid_openapi_3_1() -> None:
    described = document()

    validate(described)
    assert described["openapi"] == "3.1.0"


def test_every_operation_has_a_handler_and_no_handler_is_left_out() -> None:
    handlers = {name for name in vars(_Operator) if not name.startswith("_")}

    assert {each.name for each in OPERATIONS} == handlers
    assert len({(each.method, each.path) for each in OPERATIONS}) == len(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
def test_the_document_names_path_query_body_and_answers_of_each_operation(operation: Operation) -> None:
    described = document()["paths"][operation.path][operation.method.lower()]
    required = [each["name"] for each in described.get("parameters", []) if each["required"]]

    assert set(re.findall(r"\{(\w+)\}", operation.path)) <= set(required)
    assert ("requestBody" in described) == (operation.body is not None)
    assert set(described["responses"]) == {"200", "400", "409", "500"}


def test_no_schema_describes_a_secret_of_the_installation() -> None:
    text = msgspec.json.encode(document()).decode()

    assert not re.search(r"pepper|secret_digest|callback_token|lease_token", text)


def resolved(described: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema behind a reference."""
    name = schema["$ref"].rpartition("/")[2]
    found: dict[str, Any] = described["components"]["schemas"][name]
    return found


def test_the_members_of_an_answer_are_those_of_its_document() -> None:
    described = document()
    answer = described["paths"]["/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]

    assert set(resolved(described, answer)["properties"]) == {"origin", "pid", "version"}
