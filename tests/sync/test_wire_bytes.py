"""Regions of several devices: what the compiled programs send is what is booked, and no more."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engine.collectives import sent_across, sized

import lowcomm_jax as lc
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.sync.round_functions import AnchorState, Contributions, Senders, Values

R = 2
SHAPES = {
    "up": (256, 512),
    "down": (512, 256),
    "blocks/w": (3, 256, 128),
    "odd": (13, 7),
    "norm": (130,),
    "gain": (),
}
# Rows over one axis, columns over the other, as a transformer's layout has them.
SPECS = {
    "up": jax.P("fsdp", "tensor"),
    "down": jax.P("tensor", "fsdp"),
    "blocks/w": jax.P(None, None, "fsdp"),
    "norm": jax.P("fsdp"),
}
MATRIX = 4 * 256 * 128  # the smallest that is sharded, in bytes
VECTOR = 4 * 130  # the largest leaf that is no matrix of size


def loss_fn(params, batch, rng):
    del rng
    hidden = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    rest = sum(jnp.sum(params[k] ** 2) for k in SHAPES if k not in ("up", "down"))
    return jnp.mean((hidden - batch["x"]) ** 2) + 1e-3 * rest


def make(shape, method, regions=R):
    mesh = lc.make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])
    engine = lc.Engine(
        loss_fn,
        optax.sgd(0.05),
        method,
        regions,
        mesh=mesh,
        specs=lambda name, leaf: SPECS.get(name, jax.P()),
        stacked=("blocks",),
    )
    rng = np.random.default_rng(0)
    params = {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
    return engine, engine.init(params)


def compiled(engine, state):
    """Collectives of the send and of the move of the one fragment."""
    loop = engine.sync_loop(state)
    made, rows = loop.programs, loop.fragments.rows(0)
    count = engine.regions.count
    senders = Senders(np.ones(count, bool), np.ones(count, np.float32))
    given = (Values(state.inner.params, {}), state.anchor, state.codec[0], rows, senders)
    send = made.payload_program.lower(*given, with_snapshot=False).compile()
    sent = send(*given)
    draw = Draw(loop.programs.groups.draw(0)) if engine.method.topology else None
    payload = Contributions(sent["payload"], sent["weight"], draw=draw)
    merge = state.merge[0] if state.merge else None
    landing = (AnchorState(state.anchor, state.outer[0], merge=merge), payload, rows)
    return sized(send.as_text()), sized(made.outer_program.lower(*landing).compile().as_text())


def check_bytes(found, booked, shape):
    """Booked <= sent <= booked + padding + weights and norms of single regions."""
    devices = int(np.prod(shape[1:]))
    sent = sent_across(found, devices, shape[0])
    # Padding: under `devices` values for each dtype and layout; control: some floats a device.
    assert (sent >= booked).all(), (sent, booked)
    assert (sent <= booked + 4 * devices * 20).all(), (sent, booked)


def codec(name, **settings):
    return lc.compression.make(name, stacked=("blocks",), **settings)


def named(name):
    """A codec by its name, which no list here has; low rank of a rank that shrinks the leaves."""
    low_rank = isinstance(lc.compression.make_leaf(name), lc.compression.LowRank)
    return lc.methods.diloco(2, codec=codec(name, **({"rank": 4} if low_rank else {})))


def by_ef21():
    outer = optax.chain(lc.compression.integrate(), lc.outer.nesterov(0.7, 0.9))
    return lc.methods.diloco(2, outer, codec=lc.compression.ef21(codec("topk_int4")))


def levels():
    first, second = (codec("low_rank_int4", rank=r, basis=8) for r in (8, 4))
    return lc.compression.CodecLevels(first, (second,))


CODECS = {
    "dense": lambda: lc.methods.diloco(2),
    **{name: functools.partial(named, name) for name in lc.compression.names()},
    "int8 in slices": lambda: lc.methods.diloco(2, codec=codec("int8", reduce="two_shot")),
    "stat4 with feedback": lambda: lc.methods.diloco(2, codec=codec("stat4", error_feedback=0.9)),
    "EF21": by_ef21,
    "decoupled momentum": lambda: lc.methods.decoupled_momentum(2, stacked=("blocks",)),
    "levels": lambda: lc.methods.diloco(2, codec=levels()),
}
# Every codec and wrapper on a mesh of all axes; the quick run takes one of each kind on the
# smallest.
QUICK = [(name, (2, 1, 2, 1)) for name in ("dense", "int4", "int8 in slices")]
CASES = QUICK + [
    pytest.param(name, (2, 1, 2, 2), marks=pytest.mark.slow, id=f"{name}-all axes")
    for name in CODECS
]


BY_SLICES = ("dense", "int8 in slices")


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_payload_crosses_once_and_no_matrix_is_gathered(name, shape):
    engine, state = make(shape, CODECS[name]())
    loop = engine.sync_loop(state)
    traffic = loop.programs.exchange.traffic(loop.fragments.like(0), np.ones(R, bool))
    assert traffic.route == ("two_shot" if name in BY_SLICES else "all_gather")
    send, move = compiled(engine, state)
    devices = int(np.prod(shape[1:]))
    assert not sent_across(send, devices, R).any()
    check_bytes(send + move, traffic.sent, shape)
    if name in ("dense", "fp32"):
        return  # devices that hold the same take a share each, and hand one another fp32 values
    # A matrix is dealt out once, and not back: each device hands on its own share at most.
    moved = [c.nbytes for c in send if c.kind == "all-to-all" and "f32" in c.dtypes]
    dealt = sum(nbytes for nbytes in moved if nbytes > VECTOR)
    sizes = dict(zip(("region", "stage", "fsdp", "tensor"), shape))
    shares = [
        4 * np.prod(SHAPES[k]) / np.prod([sizes[axis] for axis in SPECS[k] if axis])
        for k in ("up", "down", "blocks/w")
    ]
    assert dealt <= sum(shares)
    # What is no matrix of size is, and comes back at most once.
    small = 4 * (np.prod(SHAPES["odd"]) + SHAPES["norm"][0] / sizes["fsdp"])
    assert sum(moved) - dealt <= 2 * small
    # Of one device's share of the smallest matrix at most.
    assert gathered_inside(send + move, shape) <= MATRIX // devices


RULES = {
    "radial": (lc.merge.RadialDirectional(), None, "all_gather"),
    "radial in int4": (lc.merge.RadialDirectional(), "int4", "all_gather"),
    "isotropic": (lc.merge.Isotropic(), None, "two_shot"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_merge_rule_costs_what_is_booked(name):
    """Payloads one by one: each goes to everyone once; their mean: no more than without a rule."""
    rule, coded, route = RULES[name]
    shape = (2, 1, 2, 1)
    method = lc.methods.diloco(2, codec=coded and codec(coded))
    engine, state = make(shape, dataclasses.replace(method, merge=rule))
    loop = engine.sync_loop(state)
    traffic = loop.programs.exchange.traffic(loop.fragments.like(0), np.ones(R, bool))
    assert traffic.route == route
    send, move = compiled(engine, state)
    assert not sent_across(send, 2, R).any()
    check_bytes(send + move, traffic.sent, shape)


def gathered_inside(found, shape):
    """Bytes of the largest fp32 all-gather inside a region."""
    devices = int(np.prod(shape[1:]))
    inside = [c for c in found if not sent_across([c], devices, shape[0]).any()]
    gathered = [c.nbytes for c in inside if c.kind == "all-gather" and "f32" in c.dtypes]
    return max(gathered, default=0)


SLICED = ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("stat4", "bf16"))]


@pytest.mark.parametrize("name", SLICED)
def test_slices_of_rows_that_do_not_divide_over_the_regions_are_cut_where_they_lie(name):
    """128 rows a device, 3 regions: each device pads its own."""
    shape = (3, 1, 2, 1)
    engine, state = make(shape, lc.methods.diloco(2, codec=codec(name)), regions=3)
    loop = engine.sync_loop(state)
    traffic = loop.programs.exchange.traffic(loop.fragments.like(0), np.ones(3, bool))
    assert traffic.route == "two_shot"
    send, move = compiled(engine, state)
    check_bytes(move, traffic.sent, shape)
    assert gathered_inside(send + move, shape) <= MATRIX // 2


@pytest.mark.parametrize("name", ["dense", "int4"])
def test_partners_exchange_a_payload_once(name):
    dense = name == "dense"
    shape = (2, 1, 2, 2)
    engine, state = make(shape, lc.methods.noloco(2, codec=None if dense else codec(name)))
    loop = engine.sync_loop(state)
    everyone, groups = np.ones(R, bool), loop.groups(0)
    payload = loop.programs.exchange.traffic(loop.fragments.like(0), everyone, groups)
    anchor = 4 * sum(int(np.prod(s)) for s in SHAPES.values())
    _, move = compiled(engine, state)
    check_bytes(move, payload.sent + anchor, shape)


@pytest.mark.slow
def test_gradients_cross_once():
    shape = (2, 1, 2, 1)
    engine, state = make(shape, lc.methods.demo(stacked=("blocks",)))
    programs = engine.sync_loop(state).programs
    carry = (state.inner, state.anchor, state.outer[0], state.codec[0])
    batch = engine.place({"x": np.ones((R, 1, 8, 256), np.float32)})
    args = (carry, state.frozen, batch, engine.region_keys, np.ones((R, 1), bool))
    text = (
        programs.family.gradient_program.lower(*args, np.ones(R, np.float32), np.int32(1))
        .compile()
        .as_text()
    )
    traffic = programs.exchange.traffic(programs.fragments.like(0), np.ones(R, bool))
    check_bytes(sized(text), traffic.sent, shape)


def test_default_layout_cuts_rows_for_a_codec():
    """So that nothing has to be dealt out by rows first; columns where rows hold no blocks."""
    mesh = lc.make_mesh(1, 1, 4, devices=jax.devices()[:4])
    params = {"wide": jnp.zeros((256, 512)), "flat": jnp.zeros((64, 512)), "norm": jnp.zeros(130)}
    found = {}
    for name in (None, "topk"):
        method = lc.methods.diloco(2, codec=name and lc.compression.make(name))
        engine = lc.Engine(loss_fn, optax.sgd(0.1), method, R, mesh=mesh)
        found[name] = engine.sync_loop(engine.init(params)).programs.specs
    assert found[None] == {
        "wide": jax.P(None, "fsdp"),
        "flat": jax.P(None, "fsdp"),
        "norm": jax.P(),
    }
    assert found["topk"] == found[None] | {"wide": jax.P("fsdp")}
