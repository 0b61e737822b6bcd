"""Parts of a method that would silently train something else are refused before any work."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.channels import Channel
from lowcomm_jax.compression import LeafCodec, PerTensor, UnitCodec, error_feedback, make
from lowcomm_jax.compression.base import Wrapper
from lowcomm_jax.compression.grid import WHOLE_ROW, Unit
from lowcomm_jax.methods import Method
from lowcomm_jax.rules.merge import Merge, Merged
from lowcomm_jax.schedule import Staggered

PARAMS = {"w": np.ones((3, 4), np.float32), "b": np.ones(2, np.float32)}
LATE = Staggered(4, delay=1)


def loss_fn(params, batch, rng):
    del rng
    return jnp.sum(params["w"]) * jnp.mean(batch) + jnp.sum(params["b"])


def refusal(loss=loss_fn, **parts) -> list[str]:
    """Lines of the error, raised before a step is made."""
    parts = dict(name="mine", schedule=LATE, outer=lc.outer.nesterov(0.7, 0.9)) | parts
    with pytest.raises(ValueError) as error:
        lc.Engine(loss, optax.sgd(0.1), Method(**parts), 3, mesh=lc.make_mesh()).init(PARAMS)
    return str(error.value).splitlines()[1:]


def rule(update, state=()):
    return optax.GradientTransformationExtraArgs(lambda params: state, update)


def summed(u, s, params=None, **extra):
    return jax.tree.map(jnp.sum, u), s


def as_list(u, s, params=None, **extra):
    return jax.tree.leaves(u), s


def growing(u, s, params=None, **extra):
    return u, jnp.zeros(2)


@dataclasses.dataclass(frozen=True)
class Keeps(Merge):
    def update(self, delta_RxN, state, weight_R, kind, momentum):
        return Merged(delta_RxN)


@dataclasses.dataclass(frozen=True)
class Reads(Merge):
    momentum = "trace"

    def update(self, delta_RxN, state, weight_R, kind, momentum):
        return Merged(jnp.mean(delta_RxN, axis=0) + momentum)


@dataclasses.dataclass(frozen=True)
class Short(Merge):
    def update(self, delta_RxN):
        return Merged(delta_RxN[0])


@dataclasses.dataclass(frozen=True)
class Bare(Merge):
    def update(self, delta_RxN, state, weight_R, kind, momentum):
        return delta_RxN[0]


@dataclasses.dataclass(frozen=True)
class Grows(Merge):
    def init(self, regions):
        return jnp.zeros(regions)

    def update(self, delta_RxN, state, weight_R, kind, momentum):
        return Merged(delta_RxN[0], state[:1])


@dataclasses.dataclass(frozen=True)
class Weighs(Grows):
    reads = "norms"

    def weigh(self, norm_R, state, weight_R, kind):
        return weight_R, state[:2]


@dataclasses.dataclass(frozen=True)
class WeighsTensors(Weighs):
    def weigh(self, norm_R, state, weight_R, kind):
        return jnp.sum(weight_R), state


@dataclasses.dataclass(frozen=True)
class WeighsShort(Weighs):
    def weigh(self, norm_R):
        return norm_R


@dataclasses.dataclass(frozen=True)
class Lies(LeafCodec):
    """Announces one byte, and adds to its state at every send."""

    name = "lies"

    def unit_of(self, matrices):
        return Unit(1, 1)

    def init(self, place, seed):
        return jnp.zeros(1)

    def encode(self, x, state, place, params=None):
        return {"x": x}, (state, state)

    def decode(self, payload, place):
        return payload["x"]

    def payload_like(self, place):
        return {"x": jax.ShapeDtypeStruct((1,), jnp.int8)}

    def payload_specs(self, place):
        return {"x": P()}


@dataclasses.dataclass(frozen=True)
class Narrows(UnitCodec):
    """Decodes in bf16."""

    name = "narrows"
    unit = WHOLE_ROW

    def encode(self, x, matrix, params=None):
        return {"x": x}

    def decode(self, payload, unit):
        return payload["x"].astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Joins(Narrows):
    """Sends an array that stands neither for units nor for matrices."""

    name = "joins"

    def encode(self, x, matrix, params=None):
        return {"x": x.reshape(-1)}


class Scaled(Wrapper):
    name = "scaled"

    def init(self, like):
        return ()

    def encode(self, tree, state, params=None):
        return self.codec.encode(tree, state)


STACK = {"w": np.ones((3, 8, 16), np.float32)}


def of_a_stack(params, batch, rng):
    del rng
    return jnp.mean(params["w"]) * jnp.mean(batch)


def test_a_rule_of_one_fragment_is_refused_though_fragments_are_alike():
    outer = (optax.sgd(0.7), optax.sgd(0.7), rule(summed))
    method = lc.methods.streaming_diloco(6, 3, 1, 0.5, outer=outer)
    engine = lc.Engine(of_a_stack, optax.sgd(0.1), method, 3, mesh=lc.make_mesh(), stacked=("w",))
    with pytest.raises(ValueError, match=r"outer\S* .*the result at \['w'\S* is float32\[\]"):
        engine.init(STACK)


@dataclasses.dataclass(frozen=True)
class OneScale(LeafCodec):
    """Sends one scale for all layers of a stack."""

    name = "one_scale"

    def unit_of(self, matrices):
        return WHOLE_ROW

    def init(self, place, seed):
        return ()

    def encode(self, x, state, place, params=None):
        scale = jnp.max(jnp.abs(x))
        payload = {"x": jnp.round(127 * x / scale).astype(jnp.int8), "scale": scale}
        return payload, (state, self.decode(payload, place))

    def decode(self, payload, place):
        return payload["x"] * (payload["scale"] / 127)

    def payload_specs(self, place):
        return {"x": P(), "scale": P()}


def test_a_codec_may_send_an_array_for_all_layers_of_a_stack():
    method = lc.methods.diloco(2, codec=PerTensor(OneScale(), stacked=("w",)))
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    engine = lc.Engine(of_a_stack, optax.sgd(0.1), method, 2, mesh=mesh, stacked=("w",))
    state, history = engine.run(engine.init(STACK), [np.ones((2, 1), np.float32)] * 2)
    assert [e.nbytes for e in history.events if e.kind == "send"] == [3 * 8 * 16 + 4]
    assert np.isfinite(state.anchor["w"]).all()


def test_a_residual_of_what_codes_leaves_is_refused():
    with pytest.raises(ValueError, match=r"not trees: put compression.PerTensor"):
        error_feedback(Narrows())


def test_a_merge_rule_that_returns_an_array_is_told_what_to_return():
    with pytest.raises(TypeError, match=r"Bare.update .*: return a lowcomm_jax.merge.Merged"):
        refusal(merge=Bare())


def test_all_that_is_wrong_with_a_method_is_listed_at_once():
    codec = make("int4").default
    mixed = PerTensor(codec, rules=(("w", Lies()),))
    lines = refusal(
        outer=rule(summed),
        landing=rule(growing, jnp.zeros(())),
        merge=Keeps(),
        hands_out=lambda anchor, state: jax.tree.map(jnp.sum, anchor),
        codec=mixed,
    )
    expected = [
        ("merge: Keeps.update's direction at ['w'] is float32[3, 3, 4], not float32[3, 4]", "axis"),
        ("outer: the result at ['b'] is float32[], not float32[2]", "leaf by leaf"),
        ("outer: the result at ['w'] is float32[], not float32[3, 4]", "leaf by leaf"),
        ("hands_out: what it gives at ['w'] is float32[]", "trees of the anchor"),
        ("landing: the new state is float32[2], not float32[]", "like that of"),
        ("codec int4: the new state is a tree", "encode returns a state like that of init"),
        ("codec int4: nbytes says 1 bytes", "buffers hold 48: return 48, or pack"),
    ]
    for start, fix in expected:
        assert any(line.startswith(f"- {start}") and fix in line for line in lines), (start, lines)
    # The leaf `b` lacks a line for each of merge and hands_out here; its codec is sound.
    assert len(lines) == len(expected) + 2


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (Narrows(), "codec narrows of w: decoded is bfloat16[1, 3, 1, 1, 4], not float32[1, 3, 1"),
        (
            Joins(),
            "codec joins of w: its payload 'x' is [12]: encode returns arrays [1, 3, 1, ",
        ),
    ],
)
def test_a_codec_of_units_keeps_their_shapes(own, line):
    lines = refusal(codec=PerTensor(make("int4").default, rules=(("w", own),)))
    assert len(lines) == 1 and line in lines[0], lines


def test_a_result_of_another_tree_is_refused():
    assert "outer: the result is a tree" in refusal(outer=rule(as_list))[0]


def test_weights_are_one_a_region():
    line = r"WeighsTensors.weigh returns weights \[\] of 3 regions: return one a region"
    with pytest.raises(TypeError, match=line):
        refusal(merge=WeighsTensors())
    assert "weigh(norm_R): write weigh(self, norm_R, state" in refusal(merge=WeighsShort())[0]
    lines = "\n".join(refusal(merge=Weighs()))
    assert "merge: Weighs.weigh's state at ['b'] is float32[2], not float32[3]" in lines
    assert "merge: Weighs.update's state at ['b'] is float32[1], not float32[3]" in lines


def test_a_state_of_a_merge_rule_that_grows_is_refused():
    (line, _) = refusal(merge=Grows())
    assert "merge: Grows.update's state at ['b'] is float32[1], not float32[3]" in line


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"outer": None}, "outer=None: with signal='progress' an outer rule moves the anchor"),
        ({"merge": Reads(), "outer": lc.outer.average()}, "Reads reads 'trace' of the outer rule"),
        (
            {"merge": Reads(), "outer": optax.chain(optax.trace(0.5), optax.trace(0.9))},
            "Reads reads 'trace': the state of a rule has 2 fields 'trace': use a rule with one",
        ),
        (
            {"outer": optax.GradientTransformation(lambda params: (), lambda u, s: (u, s))},
            "takes 2 positional arguments but 3 were given: write update(delta, state, params=None",
        ),
        (
            {"codec": Scaled(Narrows())},
            "codec: what it wraps codes leaves, not trees: put compression.PerTensor around Nar",
        ),
        ({"merge": Short()}, "merge: Short.update(delta_RxN): write update(self, delta_RxN, stat"),
        ({"hands_out": lambda anchor: anchor}, "hands_out(anchor): give a function (anchor, ou"),
        (
            {"landing": rule(lambda u, s, params=None: (u, s))},
            "landing: update(u, s, params=None): write update(progress, state, params=None, *, "
            "displacement, staleness, fragment, round, step, **extra)",
        ),
        (
            {"outer": rule(lambda u, s, params=None, *, round: (u, s))},
            "outer: update(u, s, params=None, *, round): write update(delta, state, params=None, "
            "*, fragment, round, step, **extra)",
        ),
        ({"loss": lambda params, batch: 0.0}, "loss_fn(params, batch): write loss_fn(params, ba"),
    ],
)
def test_what_cannot_be_called_names_the_signature(parts, line):
    lines = refusal(**parts)
    assert len(lines) == 1 and line in lines[0], lines


def needs_told(u, s, params=None, *, fragment, round, step):
    return u, s


def two_levels(server_rule, **changes):
    halos = lc.methods.halos(4, (1.0, 1.0, 1.0), ((0, 1), (2,)))
    servers = dataclasses.replace(halos.servers, outer=server_rule)
    return vars(dataclasses.replace(halos, servers=servers, **changes))


def of_a_channel(landing, **changes):
    channel = Channel("x", every=3, delay=2, landing=landing)
    return {"channels": (channel,), "schedule": Staggered(4), **changes}


SHAPES = "b'] is float32[], not float32[2]", "w'] is float32[], not float32[3, 4]"


@pytest.mark.parametrize(
    ("parts", "starts"),
    [
        (
            two_levels(rule(needs_told), outer=rule(needs_told), hands_out=lambda anchor: anchor),
            [
                "outer: update(u, s, params=None, *, fragment, round, step) is not told fragment, ",
                "servers.outer: update(u, s, params=None, *, fragment, round, step) is not told ",
                "hands_out(anchor): give a function",
            ],
        ),
        (
            two_levels(rule(summed), codec=PerTensor(Lies())),
            [
                *(f"servers.outer: the result at ['{shape}" for shape in SHAPES),
                "codec lies: the new state is a tree",
                *2 * ["codec lies: nbytes says"],
            ],
        ),
        (
            of_a_channel(rule(needs_told), hands_out=lambda anchor: anchor),
            [
                "channel x: landing: update(u, s, params=None, *, fragment, round, step): write "
                "update(progress, state, params=None, *, displacement, staleness, round, step, **",
                "hands_out(anchor): give a function",
            ],
        ),
        (
            of_a_channel(rule(summed), outer=rule(summed)),
            [
                *(f"outer: the result at ['{shape}" for shape in SHAPES),
                "channel x: landing: the result at ['values'] is float32[], not float32[2]",
            ],
        ),
    ],
)
def test_rules_of_servers_and_channels_are_told_among_the_others(parts, starts):
    lines = refusal(**parts)
    assert len(lines) == len(starts), lines
    assert all(line.startswith(f"- {start}") for line, start in zip(lines, starts)), lines


@pytest.mark.parametrize(
    "parts",
    [
        {"merge": Reads()},
        {"landing": lc.landing.blend(0.3), "outer": optax.adam(0.1)},
        {"landing": lc.landing.taylor_delay_correction(0.1), "pattern": ["w", "b"]},
    ],
)
def test_parts_that_keep_their_contract_are_taken(parts):
    schedule = Staggered(4, 2, delay=1) if "pattern" in parts else LATE
    parts = dict(name="mine", schedule=schedule, outer=lc.outer.nesterov(0.7, 0.9)) | parts
    lc.Engine(loss_fn, optax.sgd(0.1), Method(**parts), 3, mesh=lc.make_mesh()).init(PARAMS)
