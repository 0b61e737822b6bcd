"""What every codec of the registry must do, over odd shapes."""

import codec_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_cases import compiled, tree

from lowcomm_jax import compression

NAMES = compression.names()
# Relative L2 error of the first payload on Gaussian noise; the others drop most of white noise.
ERROR = {
    "fp32": 0.0,
    "bf16": 2.0**-8,
    "fp16": 2.0**-10,
    "int8": 0.01,
    "int4": 0.15,
    "int8_affine": 0.01,
    "int4_affine": 0.13,
    "stat8": 0.02,
    "stat4": 0.13,
    "stat2": 0.5,
    "stat2_ef": 0.5,
    "e3m0": 0.22,
    "sign": 0.65,
    "sign_ef": 0.65,
}


def payload_bytes(payload) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(payload))


@pytest.mark.parametrize("name", NAMES)
def test_announced_bytes_are_payload_bytes_leaf_by_leaf(name):
    shapes = {
        **codec_cases.SHAPES,
        "single": (1,),
        "long": (301,),
        "narrow": (13, 1),
        "matrix": (128, 96),
        "layers/b": (3, 5),
        "layers/s": (3,),
        "empty": (0, 4),
    }
    total = 0
    for key, shape in shapes.items():
        one = {key: jax.ShapeDtypeStruct(shape, jnp.float32)}
        codec = codec_cases.build(name)
        payload, _ = jax.eval_shape(codec.encode, one, codec.init(one), one)
        assert payload_bytes(payload) == codec.nbytes(one), key
        total += codec.nbytes(one)
    like = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    assert codec.nbytes(like) == total


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_shapes_error_and_no_second_compilation(name):
    codec, encode, decode, _ = compiled(name)
    x = tree(1)
    state = codec.init(x)
    payload, new = encode(x, state)
    spec = jax.tree.map(lambda a: (a.shape, a.dtype), (state, payload))
    assert payload_bytes(payload) == codec.nbytes(x)
    second, newer = encode(tree(2), new)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), (newer, second)) == spec
    assert encode._cache_size() == 1
    y = decode(payload)
    for key in x:
        assert (y[key].shape, y[key].dtype) == (x[key].shape, jnp.float32), key
    lost = sum(float(np.sum((np.asarray(y[k]) - x[k]) ** 2)) for k in x)
    whole = sum(float(np.sum(x[k] ** 2)) for k in x)
    assert lost <= ERROR.get(name, 1.0) ** 2 * whole
    assert lost > 0 or name == "fp32"


@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_regions_equals_one_region(name):
    codec, encode, decode, _ = compiled(name)
    trees = [tree(seed) for seed in range(3)]
    x_R = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    state = codec.init(trees[0])
    state_R = jax.tree.map(lambda s: jnp.stack([s] * 3), state)

    @jax.jit
    @jax.vmap
    def round_trip(x, state):
        return codec.decode(codec.encode(x, state, x)[0], x)

    y_R, y = round_trip(x_R, state_R), decode(encode(trees[2], state)[0])
    for key in y:
        np.testing.assert_allclose(y_R[key][2], y[key], rtol=2e-4, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_aggregate_is_weighted_mean_and_zero_weight_silences_garbage(name):
    if name == "dct_topk":
        pytest.skip("averages over senders: see test_codec_aggregate.py")
    codec, encode, decode, aggregate = compiled(name)
    payloads = [encode(tree(seed), codec.init(tree()))[0] for seed in range(3)]

    def garbage(a):
        return jnp.full(a.shape, jnp.nan if a.dtype == jnp.float32 else 255, a.dtype)

    trio = (payloads[0], jax.tree.map(garbage, payloads[1]), payloads[2])
    payload_R = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trio)
    mean = aggregate(payload_R, jnp.array([0.3, 0.0, 1.1]))
    first, last = decode(payloads[0]), decode(payloads[2])
    for key in mean:
        want = (0.3 * np.asarray(first[key]) + 1.1 * np.asarray(last[key])) / 1.4
        np.testing.assert_allclose(mean[key], want, rtol=1e-4, atol=1e-6, err_msg=key)
    assert all(not np.any(v) for v in aggregate(payload_R, jnp.zeros(3)).values())


@pytest.mark.parametrize("name", NAMES)
def test_constant_and_extreme_inputs_stay_finite(name):
    codec, encode, decode, _ = compiled(name)
    for value in [0.0, -0.7, 1e-30, 1e30, 1e-45]:
        x = {k: np.full_like(v, value) for k, v in tree().items()}
        state = codec.init(x)
        for _ in range(2):
            payload, state = encode(x, state)
            limit = 0.0 if value == 0.0 else max(2.1 * abs(value), 1e-36)
            for key, leaf in decode(payload).items():
                assert np.all(np.isfinite(leaf)), (value, key)
                assert np.max(np.abs(leaf)) <= limit, (value, key)
            assert all(np.all(np.isfinite(s)) for s in jax.tree.leaves(state)), value


@pytest.mark.parametrize("name", [n for n in NAMES if n != "fp16"])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(name, scale):
    codec, encode, decode, _ = compiled(name)
    x = tree(5)
    scaled = {k: v * np.float32(scale) for k, v in x.items()}
    y, z = (decode(encode(t, codec.init(t))[0]) for t in (x, scaled))
    for key in x:
        back = np.asarray(z[key]) / np.float32(scale)
        close = np.isclose(back, y[key], rtol=1e-2, atol=1e-3)
        assert np.mean(close) > 0.97, key  # a value on an edge may fall to the other side


@pytest.mark.parametrize("name", ["int4", "stat4", "topk_stat2", "low_rank_int4"])
def test_bfloat16_values_are_coded_as_the_same_values_in_fp32(name):
    x = {"w": jnp.asarray(tree(6)["odd"], jnp.bfloat16), "b": jnp.arange(7, dtype=jnp.bfloat16)}
    wide = jax.tree.map(lambda v: v.astype(jnp.float32), x)
    codec = compression.error_feedback(codec_cases.build(name), 0.9)
    encode, state = jax.jit(codec.encode), codec.init(x)
    for _ in range(2):
        narrow, same = encode(x, state), encode(wide, state)
        jax.tree.map(np.testing.assert_array_equal, narrow, same)
        state = same[1]


def test_codecs_are_hashable_values():
    for name in NAMES:
        assert codec_cases.build(name) == codec_cases.build(name)
        assert hash(codec_cases.build(name)) == hash(codec_cases.build(name))


@pytest.mark.parametrize("name", NAMES)
def test_takes_and_gives_any_structure(name):
    f32 = jnp.float32
    x = {
        "list": [jax.ShapeDtypeStruct((5,), f32), (jax.ShapeDtypeStruct((3, 2, 4), f32),)],
        "none": None,
        "half": jax.ShapeDtypeStruct((40, 60), jnp.bfloat16),
        "scalar": jax.ShapeDtypeStruct((), f32),
    }
    codec = codec_cases.build(name)
    payload, state = jax.eval_shape(codec.encode, x, codec.init(x), x)
    assert jax.tree.structure(state) == jax.tree.structure(codec.init(x))
    y = jax.eval_shape(lambda coded: codec.decode(coded, x), payload)
    assert jax.tree.structure(y) == jax.tree.structure(x)
    assert jax.tree.map(lambda a: a.shape, y) == jax.tree.map(lambda a: a.shape, x)
    assert {a.dtype for a in jax.tree.leaves(y)} == {np.dtype("float32")}
