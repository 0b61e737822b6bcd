"""What processes send one another arrives as it was, and names no code to be run."""

import math

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from etils import epath

from lowcomm_jax.mesh.serialization import decode, encode
from lowcomm_jax.rounds.fetch import PayloadPiece
from lowcomm_jax.store.errors import Parted
from lowcomm_jax.store.timing import Timing

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def promotion():
    """In the place of conftest.py's: nothing here may promote dtypes unasked."""


def there_and_back(value):
    structure, *buffers = encode(value)
    left = [bytearray(b) for b in buffers]

    def receive(size):
        data = left.pop(0)
        assert len(data) == size
        return data

    found = decode(structure, receive)
    assert not left
    return found


PLAIN = [
    *(None, True, 0, -1, 2**62, 2**63, -(2**70), 0.1, -math.inf, "", "ä", b"\x00\xff"),
    *([], (), {}, [1, (2, [3])], ("array", [1]), {1: "a", (2, "b"): None}, {3, 4}, frozenset("x")),
    *(["int", "5"], epath.Path("a") / "b", {"a": {"b": [()]}}),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values(value):
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "float8_e4m3fn", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_arrays(dtype, shape):
    array = RNG.integers(0, 2, shape).astype(jnp.dtype(dtype))
    found = there_and_back({"x": [np.asarray(array)]})["x"][0]
    assert isinstance(found, np.ndarray) and found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
    assert found.flags.writeable


def test_arrays_of_another_order_and_scalars():
    array = RNG.normal(size=(3, 4)).T
    np.testing.assert_array_equal(there_and_back(array), array)
    found = there_and_back(np.float32(0.1))
    assert found == np.float32(0.1) and type(found) is np.float32


def test_records():
    for record in (
        Timing(beat_s=0.5, deadline_s=None),
        PayloadPiece(*range(len(PayloadPiece._fields))),
    ):
        found = there_and_back([record])[0]
        assert type(found) is type(record) and found == record


class ForeignError(Exception):
    """Of no package of ours."""


def test_errors():
    found = there_and_back(FileNotFoundError(2, "no such file", "a.txt"))
    assert type(found) is FileNotFoundError and found.filename == "a.txt" and found.errno == 2
    found = there_and_back(Parted("they differ", heals=True))
    assert type(found) is Parted and found.heals and str(found) == "they differ"
    for error in (ForeignError("so it is"), ValueError(object()), ValueError("\udcff")):
        found = there_and_back(error)
        assert type(found) is RuntimeError
        told = f"{type(error).__name__}: {error}".replace("\udcff", "\\udcff")
        assert str(found) == told


@pytest.mark.parametrize(
    "value",
    [
        *(object(), lambda: 1, jnp.ones(2), ForeignError),
        *(np.array([None]), np.zeros(2, ">i4"), np.zeros(2, [("a", "i4")]), np.ma.zeros(2)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_cannot_be_told_is_refused_before_it_is_sent(value):
    with pytest.raises(TypeError, match="cannot be told to another process"):
        encode({"a": value})


@pytest.mark.parametrize(
    "hostile",
    [
        ["record", "subprocess", "Popen", ["dict", ["args", "true"]]],
        ["record", "builtins", "eval", ["dict"]],
        ["record", "lowcomm_jax.mesh.serialization", "PurePath", ["dict"]],
        ["record", "lowcomm_jax.mesh.serialization", "importlib.import_module", ["dict"]],
        ["record", "lowcomm_jax.mesh.leader", "Leader", ["dict"]],
        ["error", "builtins", "SystemExit", ["tuple"], ["dict"]],
        ["error", "builtins", "print", ["tuple"], ["dict"]],
        ["call", "x"],
        [],
    ],
    ids=str,
)
def test_bytes_that_nobody_tells_are_refused(hostile):
    with pytest.raises(ValueError, match=r"nothing that processes|unknown kind"):
        decode(msgpack.packb(hostile), lambda size: bytearray(size))
