"""Regions on device meshes: equal numbers everywhere, and no traffic where there must be none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engine import collectives as reading
from engine.collectives import collectives

import lowcomm_jax as lc
from lowcomm_jax.mesh.regions import Regions, default_mesh
from lowcomm_jax.models import TransformerConfig, build
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.sync.round_functions import AnchorState, Contributions, Senders, Values

R, STEPS = 8, 3
CONFIG = TransformerConfig(
    vocab_size=64, layers=1, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=64, max_seq_len=8
)


@pytest.fixture(scope="module")
def model():
    return build(CONFIG)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


def spec_of(model, params):
    with_path = jax.tree_util.tree_flatten_with_path(model.specs(params, {}))[0]
    named = {path_name(path): spec for path, spec in with_path}
    return lambda name, leaf: named[name]


def batches():
    rng = np.random.default_rng(0)
    return [{"tokens": rng.integers(0, 64, (R, 4, 9)).astype(np.int32)} for _ in range(STEPS)]


def make(model, params, method, shape, **kwargs):
    mesh = lc.make_mesh(*shape)
    engine = lc.Engine(
        model.loss_fn,
        optax.adamw(1e-2),
        method,
        R,
        mesh=mesh,
        specs=spec_of(model, params),
        block=STEPS,
        **kwargs,
    )
    return engine, engine.init(params)


def losses(model, params, method, shape, **kwargs):
    engine, state = make(model, params, method, shape, **kwargs)
    state, history = engine.run(state, batches())
    return history["loss"], state


METHODS = {
    "diloco": lambda: lc.methods.diloco(2),
    "streaming": lambda: lc.methods.streaming_diloco(2, 2, 1, 0.3, pattern="balanced"),
    "ddp": lambda: lc.methods.ddp(),
    "as_coded": lambda: lc.methods.decoupled_momentum(2, "as_coded"),
}
# Every kind of sharding for each; the other meshes, and what compiles for a minute, are slow.
ALL_AXES = (2, 1, 2, 2)
MESHES = [
    ("diloco", (ALL_AXES,)),
    pytest.param("streaming", (ALL_AXES,), marks=pytest.mark.slow),
    pytest.param("ddp", (ALL_AXES,), marks=pytest.mark.slow),
    pytest.param("diloco", ((4, 1, 2, 1), (8, 1, 1, 1)), marks=pytest.mark.slow),
    pytest.param("as_coded", (ALL_AXES,), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, shapes", MESHES)
def test_every_mesh_gives_the_same_losses(model, params, name, shapes):
    expected, _ = losses(model, params, METHODS[name](), (1, 1, 1, 1))
    for shape in shapes:
        actual, state = losses(model, params, METHODS[name](), shape)
        # AdamW steps of 1e-2: partial sums in another order, amplified by Adam's division.
        np.testing.assert_allclose(actual, expected, rtol=2e-5, err_msg=str(shape))
        kernel = state.inner.params["blocks/0/mlp/up/kernel"]
        assert kernel.sharding.spec == jax.P("region", "fsdp", "tensor")


def test_vmap_and_map_agree(model, params):
    mapped, _ = losses(model, params, METHODS["streaming"](), ALL_AXES, replicas="map")
    batched, _ = losses(model, params, METHODS["streaming"](), ALL_AXES, replicas="vmap")
    np.testing.assert_allclose(batched, mapped, rtol=2e-5)


def region_of(device: int, shape) -> int:
    return device // (shape[1] * shape[2] * shape[3])


def crossing(found, shape):
    """Collectives with a group of devices of more than one region."""
    return [
        (kind, groups)
        for kind, groups in found
        if any(len({region_of(d, shape) for d in group}) > 1 for group in groups)
    ]


def staged(engine):
    """As `run` stages them, so that the program read is the one that ran."""
    return engine.place({"tokens": np.stack([b["tokens"] for b in batches()], axis=1)})


@pytest.mark.parametrize("shape", [ALL_AXES, (4, 1, 2, 1)])
def test_inner_step_has_no_collective_across_regions(model, params, shape):
    engine, state = make(model, params, METHODS["diloco"](), shape)
    programs = engine.sync_loop(state).programs
    args = (state.inner, state.frozen, staged(engine), engine.region_keys, None, np.int32(2))
    found = collectives(programs.inner_program.lower(*args).compile().as_text())
    assert found, "FSDP inside a region must communicate, or the test sees nothing"
    assert not crossing(found, shape)


def test_all_groups_of_a_collective_are_read():
    line = (
        "%a = f32[2]{0} all-gather(%b), channel_id=1, replica_groups={{0,4},{1,5}}, dimensions={0}"
    )
    assert reading.groups(line) == [[0, 4], [1, 5]]


def test_ddp_is_the_exception(model, params):
    shape = ALL_AXES
    engine, state = make(model, params, METHODS["ddp"](), shape)
    carry = (state.inner, state.anchor, state.outer[0], state.codec[0])
    mask = np.ones((R, STEPS), bool)
    args = (
        carry,
        state.frozen,
        staged(engine),
        engine.region_keys,
        mask,
        np.ones(R, np.float32),
        np.int32(2),
    )
    lowered = engine.sync_loop(state).programs.family.gradient_program.lower(*args)
    assert crossing(collectives(lowered.compile().as_text()), shape)


def mixing():
    """An outer rule that multiplies a tensor with itself, which compilers cut over regions."""

    def update(delta, state, params=None, **extra):
        return {k: -x @ (x.T @ x) if x.ndim == 2 else -x for k, x in delta.items()}, state

    return lc.outer.Mixing(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("outer", [None, mixing()], ids=["nesterov", "mixing"])
def test_outer_reduction_moves_each_shard_among_its_peers_only(model, params, outer):
    shape = (4, 1, 2, 1)
    method = METHODS["streaming"]()
    method = method if outer is None else dataclasses.replace(method, outer=outer)
    engine, state = make(model, params, method, shape)
    loop = engine.sync_loop(state)
    programs, p = loop.programs, 0
    leaves = programs.fragments.leaves(state.anchor, p)
    payload = {k: jnp.broadcast_to(x, (R, *x.shape[1:])) for k, x in leaves.items()}
    payload = {
        k: jax.device_put(x, engine.regions.sharding("region", *programs.specs[k]))
        for k, x in payload.items()
    }
    weight = jnp.ones(R)
    rows = programs.fragments.rows(p)
    held, sent = AnchorState(leaves, state.outer[p]), Contributions(payload, weight)
    lowered = programs.outer_program.lower(held, sent, rows)
    found = crossing(collectives(lowered.compile().as_text()), shape)
    assert {kind for kind, _ in found} == {"all-to-all", "all-gather"}
    for _, groups in found:
        for group in groups:
            assert len({d % 2 for d in group}) == 1, "a shard left its place inside the region"


def test_sending_reads_only_the_fragment_and_talks_to_nobody(model, params):
    shape = (4, 1, 2, 1)
    engine, state = make(model, params, METHODS["streaming"](), shape)
    loop = engine.sync_loop(state)
    cut, send = loop.fragments, loop.programs.payload_program
    whole = sum(cut.numel(p) for p in range(len(cut)))
    for p in range(len(cut)):
        lowered = send.lower(
            Values(cut.leaves(state.inner.params, p), {}),
            cut.leaves(state.anchor, p),
            state.codec[p],
            cut.rows(p),
            Senders(np.ones(R, bool), np.ones(R, np.float32)),
            with_snapshot=True,
        )
        out = lowered.out_info["payload"]
        assert sum(np.prod(x.shape) for x in out.values()) == R * cut.numel(p) < R * whole
        assert not crossing(collectives(lowered.compile().as_text()), shape)


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_mean_is_bit_identical_on_every_mesh_and_sums_in_region_order(slots):
    rng = np.random.default_rng(1)
    x = {"a": rng.standard_normal((R, 7, 6)).astype(np.float32) * 1e3, "s": np.ones(R, np.float32)}
    weight = np.array([1, 0.5, 0, 2, 1, 1, 0.25, 1], np.float32)
    x["a"][2] = np.nan  # weight 0 must silence it
    regions = Regions(R, lc.make_mesh(region=slots, fsdp=8 // slots))
    fsdp = None if 6 % (8 // slots) else "fsdp"
    specs = {"a": jax.P(None, fsdp), "s": jax.P()}
    placed = {k: jax.device_put(v, regions.sharding("region", *specs[k])) for k, v in x.items()}
    got = jax.jit(lambda t, w: regions.mean(t, w, specs))(placed, weight)
    total = np.float32(0)
    acc = np.zeros((7, 6), np.float32)
    for r in range(R):
        total = np.float32(total + weight[r])
        if weight[r] > 0:
            acc = acc + x["a"][r] * weight[r]
    assert got["a"].shape == (1, 7, 6)
    np.testing.assert_array_equal(got["a"][0], acc * (np.float32(1) / total))
    np.testing.assert_allclose(got["s"], [1.0], rtol=1e-7)


def test_default_mesh_uses_all_devices():
    assert dict(default_mesh(6).shape) == {
        "region": 2,
        "stage": 1,
        "fsdp": 4,
        "tensor": 1,
    }
