"""Whatever bytes come from the network or the store, parsers give plain values or reject them."""

import contextlib
import copy
import json
import os
import ssl
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowcomm_jax.checkpoint import store
from lowcomm_jax.rounds.state_transfer import read_state
from lowcomm_jax.store import records, wire
from lowcomm_jax.store.commits import Job
from lowcomm_jax.store.errors import Rejected, Unreadable
from lowcomm_jax.store.records import (
    Admitted,
    Agreed,
    Announcement,
    Array,
    Beat,
    Commit,
    Confirmation,
    Epoch,
    Late,
    Payload,
    Run,
    RunOfAnyFormat,
    State,
)
from lowcomm_jax.store.secret import Seal
from lowcomm_jax.store.serving import Credentials, tls_context

# FUZZ=300 looks for new failures, with new seeds; what it finds becomes an `example` of its test.
FUZZ = os.environ.get("FUZZ")
QUICK = settings(
    max_examples=int(FUZZ or 80), deadline=None, derandomize=not FUZZ, print_blob=bool(FUZZ)
)
ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "c": np.arange(5, dtype=np.uint8)}
LIKE = wire.shapes_of(ARRAYS)
GIVEN = {"run_id": "run", "job": Job(1, 3)}
WHOLE = wire.pack(**GIVEN, serial=7, arrays=ARRAYS)
SEAL = Seal("run", b"a secret of the tests")
RECORD = SEAL.close("key", Agreed({"step": 3}))
NESTED = b"[" * 100_000

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def altered(draw, whole):
    """A valid message with a few bytes changed, cut out, or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at, kind = draw(st.integers(0, len(data))), draw(st.sampled_from("xci"))
        data[at : at + (0 if kind == "i" else draw(st.integers(1, 9)))] = (
            b"" if kind == "c" else draw(st.binary(min_size=1, max_size=9))
        )
    return bytes(data)


def header(body) -> bytes:
    """A payload of safetensors whose header is this JSON."""
    text = json.dumps(body).encode()
    return len(text).to_bytes(8, "little") + text + bytes(29)


@QUICK
@given(st.binary(max_size=300) | altered(WHOLE) | JSON.map(header))
@example(b"")
@example((1 << 62).to_bytes(8, "little"))
@example(len(NESTED).to_bytes(8, "little") + NESTED)
@example(header({"__metadata__": {"lowcomm": NESTED.decode()}}))
def test_payloads(data):
    with contextlib.suppress(Rejected):
        found = wire.unpack(data, **GIVEN, like=LIKE)
        assert wire.shapes_of(found) == LIKE


@QUICK
@given(JSON)
def test_descriptions_of_payloads_in_a_file_that_is_sound(about):
    described = {"__metadata__": {"lowcomm": json.dumps(about)}}
    with contextlib.suppress(Rejected):
        wire.unpack(header(described), **GIVEN, like=None)


@QUICK
@given(st.binary(max_size=200) | altered(RECORD) | JSON.map(lambda x: json.dumps(x).encode()))
@example(NESTED)
@example(b"\n" + NESTED)
def test_records(data):
    try:
        assert SEAL.open("key", data, Agreed) == Agreed({"step": 3})
    except Rejected:
        assert data != RECORD


PAYLOAD = Payload("0" * 64, 10, (None, Payload("1" * 64, 3)), Payload("2" * 64, 4))
FLIGHT = {"in_flight": [{"key": "0@4", "fragment": 0, "moved": False}]}
TERMS = {"step": 4, "anchor": "ff"}
EXAMPLES = [  # one of every kind, as regions write it
    Run(6, "run", 2, "store", "stop", {"seed": "1"}),
    Beat(3, 5, step=7, certificate="x", anchors={"4": {"anchor": "ff"}}),
    Epoch({0: 1, 1: 4}),
    Announcement(PAYLOAD, TERMS),
    Confirmation({0: "3" * 64}),
    Commit({0: Admitted(1, PAYLOAD)}, {0: TERMS}, 0, {0: 1, 1: 4}, {2: Late(3, 1)}),
    State(4, 0, 1, {1: 2}, {"w": Array("F32", (2, 3), (("2" * 64, 4),))}, FLIGHT),
    Agreed(TERMS),
]
ODD = st.sampled_from([None, True, -1, 1 << 70, 1.5, "", "x", [], {}, [1], {"a": 1}, "\u0660"])


@st.composite
def twisted(draw, body):
    """A valid body with one part somewhere in it replaced, removed, or joined by another."""
    body = copy.deepcopy(json.loads(json.dumps(body)))
    inner, place = None, body
    while isinstance(place, dict | list) and place and draw(st.integers(0, 3)):
        at = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner, place = (place, at), place[at]
    if inner is None:
        return draw(st.one_of(ODD, st.just({**body, "more": draw(ODD)})))
    holder, at = inner
    if draw(st.booleans()):
        holder[at] = draw(ODD | JSON)
    else:
        del holder[at]
    return body


def test_there_is_an_example_of_every_record():
    """Those that stand by themselves: the others are parts of them."""
    every = {kind for kind in vars(records).values() if isinstance(kind, type)}
    alone = {kind for kind in every if issubclass(kind, records.Record)} - {records.Record}
    assert {type(one) for one in EXAMPLES} == alone - {Payload, Admitted, Late, Array}


@pytest.mark.parametrize("whole", EXAMPLES, ids=lambda x: type(x).__name__)
def test_what_is_signed_need_not_fit(whole):
    """Records of who knows the secret, or, without a secret, of anybody: no other error is raised,
    and what is read can be written again."""
    kind = type(whole)
    plain = json.loads(msgspec.json.encode(whole))
    assert SEAL.open("key", SEAL.close("key", whole), kind) == whole

    @QUICK
    @given(twisted(plain) | JSON)
    def fuzz(body):
        data = json.dumps(body).encode()
        with contextlib.suppress(Unreadable):
            found = SEAL.open("key", SEAL._mac("key", data, records.FORMAT) + b"\n" + data, kind)
            assert SEAL.open("key", SEAL.close("key", found), kind) == found
            if kind is State:
                with contextlib.suppress(Rejected):
                    read_state("result/1", found, SimpleNamespace(get=lambda *given: b""))

    fuzz()


def test_what_is_signed_and_nested():
    data = SEAL._mac("key", NESTED, records.FORMAT) + b"\n" + NESTED
    with pytest.raises(Unreadable, match="cannot be read"):
        SEAL.open("key", data, Agreed)


WRONG = {
    Beat: [{"counter": 1 << 70}, {"step": True}, {"step": 1.0}, {"certificate": 1}, {"more": 1}],
    Announcement: [
        {"terms": {"step": 1.5}},
        {"payload": {"digest": "/" * 64, "nbytes": 1}},
        {"payload": {"digest": "0" * 63 + "\n", "nbytes": 1}},
        {"payload": {"digest": "0" * 64, "nbytes": -1}},
    ],
    Commit: [
        {"admitted": {"-1": None}},
        {"present": [1]},
        {"present": {"٣": 1}},
        {"writer": "0"},
    ],
}


@pytest.mark.parametrize("kind", WRONG)
def test_numbers_and_digests_are_those_that_regions_can_use(kind):
    """Not a number of more than 64 bits, no truth value for one, no path for a digest."""
    [whole] = [one for one in EXAMPLES if type(one) is kind]
    plain = json.loads(msgspec.json.encode(whole))
    for change in WRONG[kind]:
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(json.dumps(plain | change), type=kind)


def test_a_run_of_any_format_says_which():
    later = {"format": 99, "run": "run", "colour": "blue"}
    data = json.dumps(later).encode()
    assert msgspec.json.decode(data, type=RunOfAnyFormat) == RunOfAnyFormat(99, "run")


CHECKPOINT = {
    "metrics": {"loss": 1.5},
    "step": 4,
    "regions": 2,
    "arrays": {"w": ["bfloat16", [3], [[0, 0, [0], "bfloat16", [3], "ab"]]]},
    "in_flight": {"": [{"key": "0@4", "fragment": 0}]},
}


def test_documents_of_checkpoints():
    """Whose digest anybody can make: shapes follow, or the checkpoint is damaged."""
    store.saved_shapes(store.checked(CHECKPOINT, "here"))

    @QUICK
    @given(twisted(CHECKPOINT) | JSON)
    def fuzz(body):
        try:
            known = store.checked(body, "here")
        except store.DamagedError:
            return
        store.saved_shapes(known)

    fuzz()


@QUICK
@given(st.text(max_size=200))
@example("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
def test_certificates(text):
    """Those of a heartbeat, which only who knows the secret can write."""
    with pytest.raises(OSError, match="no certificate"):
        tls_context(ssl.PROTOCOL_TLS_CLIENT, Credentials(text, "", ""))
