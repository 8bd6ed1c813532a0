"""The golden vectors of the wire contract."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qlworker.domain.document import Document
from qlworker.domain.errors import Refused
from qlworker.domain.offer import WorkerFence
from qlworker.wire.activation import ActivationRequest, ActivationResponse, RunningRequest
from qlworker.wire.codec import decode
from qlworker.wire.completion import CompletionRequest, CompletionResponse, UploadHeader, UploadResponse
from qlworker.wire.lease_control import LeaseControlRequest, LeaseControlResponse
from qlworker.wire.offers import OfferRequest, read_answer
from qlworker.wire.secrets import EnvironmentBundle, SecretRequestV1, SecretRequestV2
from qlworker.wire.session import (
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    TransitionRequest,
    TransitionResponse,
)

VECTORS = json.loads((Path(__file__).parent.parent / "vectors/vectors.json").read_text("utf-8"))
CASES = VECTORS["responseVerdicts"]["cases"]
PARSERS = {
    "activation": ActivationResponse,
    "leaseControl": LeaseControlResponse,
    "session-register": RegisterResponse,
    "session-heartbeat": HeartbeatResponse,
    "session-transition": TransitionResponse,
    "artifact": UploadResponse,
    "completion": CompletionResponse,
}
REQUESTS: dict[str, type[Document]] = {
    "register": RegisterRequest,
    "heartbeat": HeartbeatRequest,
    "transition": TransitionRequest,
    "offers": OfferRequest,
    "starting": ActivationRequest,
    "running": RunningRequest,
    "start-failure": ActivationRequest,
    "secrets (v1, baseline)": SecretRequestV1,
    "secrets (v2, later)": SecretRequestV2,
    "lease-control": LeaseControlRequest,
    "completion": CompletionRequest,
}


def is_accepted(case: dict[str, Any]) -> bool:
    body = case["bodyText"].encode()
    try:
        if case["parser"] == "offer":
            authority = case["authority"]
            worker = WorkerFence(
                worker_id=authority["workerId"],
                session_id=authority["workerSessionId"],
                generation=authority["workerGeneration"],
            )
            request = OfferRequest(
                worker_generation=authority["workerGeneration"],
                offer_id=authority["offerId"],
                lease_token=authority["leaseToken"],
            )
            read_answer(body, worker, request)
        else:
            decode(body, PARSERS[case["parser"]])
    except Refused:
        return False
    return True


@pytest.mark.req("R122", "R123", "R124", "R125", "R126")
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_every_response_vector_is_accepted_or_refused_as_the_original_parser_does(case: dict[str, Any]) -> None:
    assert is_accepted(case) is case["accepted"]


def test_every_parser_of_the_response_vectors_has_a_structure() -> None:
    assert {case["parser"] for case in CASES} == {"offer", *PARSERS}


@pytest.mark.parametrize("vector", VECTORS["requestBodies"]["requests"], ids=lambda vector: vector["operation"])
def test_every_request_body_vector_survives_decoding_and_encoding(vector: dict[str, Any]) -> None:
    document = decode(json.dumps(vector["body"]).encode(), REQUESTS[vector["operation"]])

    assert json.loads(document.to_json()) == vector["body"]


@pytest.mark.parametrize("vector", VECTORS["requestBodies"]["requests"], ids=lambda vector: vector["operation"])
def test_an_unknown_member_in_any_request_is_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        decode(json.dumps(vector["body"] | {"extra": 1}).encode(), REQUESTS[vector["operation"]])


@pytest.mark.parametrize(
    "vector", [each for each in VECTORS["digests"] if each["kind"] == "artifactPreamble"], ids=lambda each: each["id"]
)
def test_the_artifact_preamble_is_byte_equal_to_its_vector(vector: dict[str, Any]) -> None:
    header = msgspec.convert(vector["input"], UploadHeader)

    assert header.preamble().hex() == vector["expected"]


def test_the_environment_bundle_is_sorted_by_code_unit_as_in_its_vector() -> None:
    (vector,) = [each for each in VECTORS["digests"] if each["kind"] == "environmentBundle"]

    bundle = EnvironmentBundle.parse(json.dumps(vector["input"]))

    assert bundle.to_json().decode() == vector["expected"]


def test_a_refusal_names_the_member_and_never_the_value() -> None:
    body = json.dumps({"workerGeneration": 1, "offerId": "a", "leaseToken": "s3cret value that is not a token"}).encode()

    with pytest.raises(Refused) as caught:
        decode(body, OfferRequest)

    assert "leaseToken" in str(caught.value)
    assert "s3cret" not in str(caught.value)
