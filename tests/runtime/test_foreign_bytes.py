"""Whatever bytes come from the network or the store, parsers give plain values or reject them."""

import contextlib
import copy
import dataclasses
import json
import os

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowcomm_jax.checkpoint import store
from lowcomm_jax.runtime import (
    anchor_check,
    final_state,
    membership,
    records,
    state_transfer,
    wire,
)
from lowcomm_jax.runtime.certificates import Authority
from lowcomm_jax.runtime.commits import Announcement, Commit, Late, PayloadRecord
from lowcomm_jax.runtime.errors import Rejected
from lowcomm_jax.runtime.heartbeat import Beat
from lowcomm_jax.runtime.secret import Seal

# FUZZ=300 looks for new failures, with new seeds; what it finds becomes an `example` of its test.
FUZZ = os.environ.get("FUZZ")
QUICK = settings(
    max_examples=int(FUZZ or 80), deadline=None, derandomize=not FUZZ, print_blob=bool(FUZZ)
)
ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "c": np.arange(5, dtype=np.uint8)}
LIKE = wire.shapes_of(ARRAYS)
GIVEN = {"run_id": "run", "key": "k", "region": 1}
WHOLE = wire.pack("run", "k", 1, ARRAYS)
SEAL = Seal("run", b"a secret of the tests")
RECORD = SEAL.close("key", {"step": 3})
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
@example(header({"__metadata__": {"payload": NESTED.decode()}}))
def test_payloads(data):
    with contextlib.suppress(Rejected):
        found = wire.unpack(data, **GIVEN, like=LIKE)
        assert wire.shapes_of(found) == LIKE


@QUICK
@given(JSON)
def test_descriptions_of_payloads_in_a_file_that_is_sound(about):
    described = {"__metadata__": {"payload": json.dumps(about)}}
    with contextlib.suppress(Rejected):
        wire.unpack(header(described), **GIVEN, like=None)


@QUICK
@given(
    st.binary(max_size=200)
    | altered(RECORD)
    | JSON.map(lambda x: json.dumps(x).encode())
    | st.tuples(JSON, JSON).map(lambda x: json.dumps({"body": x[0], "mac": x[1]}).encode())
)
@example(NESTED)
def test_records(data):
    try:
        assert SEAL.open("key", data) == {"step": 3}
    except Rejected:
        assert data != RECORD


PAYLOAD = PayloadRecord("0" * 64, 10, (None, PayloadRecord("1" * 64, 3)))
PIECE = ["x" * 8, "2" * 64, 4]
FLIGHT = {"in_flight": [{"key": "0@4", "fragment": 0, "moved": False}]}
ARRAYS_OF = {"anchor/w": ["float32", [2, 3], [PIECE]]}
BODIES = {  # reader of a kind of record -> one as regions write it
    "beat": (Beat.read, dataclasses.asdict(Beat(3, 5, step=7, passes={"a": "b"}))),
    "said": (
        Announcement.read,
        dataclasses.asdict(Announcement(1, 2, PAYLOAD, {"step": 4, "anchor": "ff"})),
    ),
    "commit": (
        Commit.read,
        dataclasses.asdict(Commit({0: PAYLOAD}, {0: {"step": 4}}, 0, (0, 1), {2: Late(3, 1)})),
    ),
    "epoch": (membership._ROSTER, {"0": 1, "1": 4}),
    "held": (records.by_region(records.text), {"0": "ab"}),
    "state": (
        state_transfer._given,
        {"step": 4, "donor": 0, "asked": {"1": 2}, "arrays": ARRAYS_OF, "document": FLIGHT},
    ),
    "result": (
        final_state._left,
        {"step": 4, "arrays": {"w": ["float32", [2], [PIECE[1:]]]}, "document": FLIGHT},
    ),
    "vouch": (
        anchor_check._told,
        {"incarnation": 1, "step": 4, "moments": {"4": {"anchor": "ff"}}},
    ),
}
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


@pytest.mark.parametrize("kind", BODIES)
def test_what_is_signed_need_not_fit(kind):
    """Records of who knows the secret, of another version, or, without a secret, of anybody."""
    read, whole = BODIES[kind]
    plain = json.loads(json.dumps(whole))
    assert SEAL.open("key", SEAL.close("key", plain), read) is not None

    @QUICK
    @given(twisted(plain) | JSON)
    def fuzz(body):
        with contextlib.suppress(Rejected):
            SEAL.open("key", SEAL.close("key", body), read)

    fuzz()


def test_what_is_signed_and_nested():
    text = NESTED.decode()
    data = json.dumps({"body": text, "mac": SEAL._mac("key", text)}).encode()
    with pytest.raises(Rejected, match="not what stands there"):
        SEAL.open("key", data)


@pytest.mark.parametrize("kind", ["beat", "said", "commit"])
def test_numbers_and_digests_are_those_that_regions_can_use(kind):
    """Not a number of more than 64 bits, no truth value for one, no path for a digest."""
    read, whole = BODIES[kind]
    plain = json.loads(json.dumps(whole))
    wrong = {
        "beat": [{"counter": 1 << 70}, {"step": True}, {"step": 1.0}, {"passes": {"a": 1}}],
        "said": [
            {"terms": {"step": 1.5}},
            {"payload": {**plain.get("payload", {}), "digest": "/"}},
        ],
        "commit": [{"payloads": {"-1": None}}, {"present": [None]}, {"writer": "0"}],
    }
    for change in wrong[kind]:
        with pytest.raises(Rejected):
            read(plain | change)


CHECKPOINT = {
    "metrics": {"loss": 1.5},
    "format": 1,
    "step": 4,
    "regions": 2,
    "arrays": {"shared": {"anchor/w": ["float32", [3], "ab"]}, "region_0": {}},
    "in_flight": [{"key": "0@4", "fragment": 0}],
}
IN_PARTS = {
    **CHECKPOINT,
    "format": 2,
    "arrays": {"w": ["bfloat16", [3], [[0, 0, [0], "bfloat16", [3], "ab"]]]},
}


@pytest.mark.parametrize("document", [CHECKPOINT, IN_PARTS])
def test_documents_of_checkpoints(document):
    """Whose digest anybody can make: shapes follow, or the checkpoint is damaged."""
    store.saved_shapes(store.checked(document, "here"))

    @QUICK
    @given(twisted(document) | JSON)
    def fuzz(body):
        try:
            known = store.checked(body, "here")
        except store.DamagedError:
            return
        if known["format"] in (1, 2):
            store.saved_shapes(known)

    fuzz()


@QUICK
@given(st.text(max_size=200))
def test_certificates(text):
    """Those of a heartbeat, which only who knows the secret can write."""
    with pytest.raises(ValueError):
        AUTHORITY.issue(text, 1)


AUTHORITY = Authority(0)
