"""Whatever bytes come from the network or the store, parsers give plain values or reject them."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowcomm_jax.runtime import wire
from lowcomm_jax.runtime.certificates import Authority
from lowcomm_jax.runtime.errors import Rejected
from lowcomm_jax.runtime.secret import Seal

QUICK = settings(max_examples=150, deadline=None, derandomize=True)
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


@QUICK
@given(st.text(max_size=200))
def test_certificates(text):
    """Those of a heartbeat, which only who knows the secret can write."""
    with pytest.raises(ValueError):
        AUTHORITY.issue(text, 1)


AUTHORITY = Authority(0)
