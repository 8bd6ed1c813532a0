"""The golden vectors of everything that the domain computes."""

import hmac
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qlworker.domain import canonical
from qlworker.domain.capabilities import Capabilities, Dialect
from qlworker.domain.identity import DurableHandle
from qlworker.domain.receipt import Receipt
from qlworker.domain.revision import ExecutionRevision, SecretReference, task_revision

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "vectors.json").read_text("utf-8"))["digests"]


def of_kind(kind: str) -> list[Any]:
    found = [pytest.param(vector["input"], vector["expected"], id=vector["id"]) for vector in VECTORS if vector["kind"] == kind]
    assert found, kind
    return found


@pytest.mark.parametrize(("given", "expected"), of_kind("revision"))
def test_a_revision_has_its_canonical_text_and_digest(given: dict[str, Any], expected: dict[str, str]) -> None:
    revision = msgspec.convert({**given, "contentDigest": "0" * 64}, ExecutionRevision).canonical()
    plan = revision.plan()
    del plan["createdAtMs"]

    assert canonical.js_json(plan).decode() == expected["canonical"]
    assert revision.content_digest == expected["digest"]
    revision.verify()
    changed = msgspec.structs.replace(revision, task_id="another")
    with pytest.raises(ValueError, match="contentDigest"):
        changed.verify()


@pytest.mark.parametrize(("given", "expected"), of_kind("capabilities"))
def test_capabilities_have_their_canonical_text_and_hash(given: dict[str, Any], expected: dict[str, str]) -> None:
    document = msgspec.convert(given["capabilities"], Capabilities)

    assert document.text() == expected["json"]
    assert document.digest() == expected["hash"]
    assert document.dialect is Dialect(given["dialect"])
    assert Capabilities.parse(expected["json"]) == document.canonical()


@pytest.mark.parametrize(("given", "expected"), of_kind("leaseTokenDigest"))
def test_a_lease_token_is_digested_as_text(given: str, expected: str) -> None:
    assert canonical.lease_token_digest(given) == expected


@pytest.mark.parametrize(("given", "expected"), of_kind("callbackTokenDigest"))
def test_a_callback_token_is_digested_as_bytes(given: str, expected: str) -> None:
    assert canonical.callback_token_digest(canonical.from_b64u(given)) == expected


@pytest.mark.parametrize("length", [0, 31, 33])
@pytest.mark.req("R396")
def test_a_callback_token_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="exactly 32 bytes"):
        canonical.callback_token_digest(bytes(length))


@pytest.mark.parametrize(("given", "expected"), of_kind("logArtifactId"))
def test_a_log_artifact_is_named_after_its_four_identities(given: dict[str, str], expected: str) -> None:
    name = canonical.log_artifact_id(given["projectId"], given["runId"], given["attemptId"], given["offerId"])

    assert name == expected


@pytest.mark.parametrize(("given", "expected"), of_kind("secretRef"))
def test_a_secret_reference_has_its_text(given: dict[str, Any], expected: str) -> None:
    assert msgspec.convert(given, SecretReference).text() == expected
    assert SecretReference.parse(expected).text() == expected


@pytest.mark.parametrize(("given", "expected"), of_kind("durableHandle"))
def test_a_durable_handle_has_its_text(given: dict[str, Any], expected: str) -> None:
    identity = given["identity"]
    handle = DurableHandle(
        v=1,
        h=given["handleId"],
        b=identity["bootId"],
        p=identity["pid"],
        g=identity["processGroupId"],
        s=identity["startTimeTicks"],
    )

    assert handle.text() == expected
    assert DurableHandle.parse(expected) == handle


@pytest.mark.parametrize(("given", "expected"), of_kind("taskRevision"))
def test_a_task_revision_names_number_and_digest(given: dict[str, Any], expected: str) -> None:
    assert task_revision(given["revision"], given["contentDigest"]) == expected


@pytest.mark.parametrize(("given", "expected"), of_kind("credentialDigest"))
def test_a_credential_is_stored_as_a_keyed_digest(given: dict[str, str], expected: str) -> None:
    pepper, secret = canonical.from_b64u(given["pepper"]), canonical.from_b64u(given["secret"])

    assert canonical.credential_digest(pepper, given["credentialId"], secret) == expected


@pytest.mark.parametrize(("given", "expected"), of_kind("receipt"))
def test_a_receipt_of_the_upstreams_form_has_its_text(given: dict[str, Any], expected: str) -> None:
    assert msgspec.convert(given, Receipt).to_json().decode() == expected
    assert Receipt.parse(expected.encode()).to_json().decode() == expected


@pytest.mark.parametrize(("given", "expected"), of_kind("collation"))
def test_names_are_sorted_by_root_collation(given: list[str], expected: list[str]) -> None:
    assert sorted(given, key=canonical.collation_key) == expected


@pytest.mark.parametrize(("given", "expected"), of_kind("poolKey"))
def test_a_connection_pool_is_named_after_its_material(given: list[str], expected: str) -> None:
    assert canonical.pool_key([blob.encode() for blob in given]) == expected
    assert canonical.pool_key([given[0].encode() + given[1].encode(), b"", b"CA1", b"CA2"]) != expected


def test_every_kind_of_vector_is_tested_somewhere() -> None:
    here = {
        "revision",
        "capabilities",
        "leaseTokenDigest",
        "callbackTokenDigest",
        "logArtifactId",
        "secretRef",
        "durableHandle",
    }
    here |= {"taskRevision", "credentialDigest", "receipt", "collation", "poolKey"}
    on_the_wire = {"artifactPreamble", "environmentBundle"}

    assert {vector["kind"] for vector in VECTORS} == here | on_the_wire


def test_labels_that_look_like_array_indexes_come_first() -> None:
    labels = {"b": "1", "10": "2", "2": "3", "01": "4", "4294967295": "5", "A": "6"}

    assert list(canonical.ordered_labels(labels)) == ["2", "10", "01", "4294967295", "A", "b"]


@pytest.mark.parametrize("text", ["QQ==", "Q", "QR", "Q Q", "QQ\n", "+/", "é"])
def test_base64url_that_is_not_canonical_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        canonical.from_b64u(text)


@pytest.mark.req("R189")
def test_digests_are_compared_as_a_whole_by_the_constant_time_primitive(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = "0123456789abcdef" * 4
    primitive, compared = hmac.compare_digest, []

    def spy(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return primitive(left, right)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    others = [digest[:at] + "x" + digest[at + 1 :] for at in range(64)]

    assert canonical.digests_equal(digest, digest)
    assert not any([canonical.digests_equal(digest, other) for other in others])  # noqa: C419 - all of them, not the first
    assert compared == [(digest.encode(), other.encode()) for other in [digest, *others]]
    assert not canonical.digests_equal(digest, digest[:63])
