"""Merge rules tensor by tensor against NumPy: odd shapes, stacked layers, kinds of leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import merging
from oracle_runs import started

import lowcomm_jax as lc
from lowcomm_jax import merge

SHAPES = {"embed": (7, 3), "w": (3, 5), "b": (6,), "scalar": (), "blocks/w": (4, 5, 2)}
STACKED = ("blocks",)
WEIGHTS = [0.2, 0.5, 0.3]


def draw(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {k: np.asarray(rng.standard_normal(s), np.float32) for k, s in shapes.items()}


def by_layer(tree):
    """The stack as one leaf a layer, for rules that know of no stacks."""
    stack = tree["blocks/w"]
    rest = {k: x for k, x in tree.items() if k != "blocks/w"}
    return rest | {f"blocks/w {i}": stack[i] for i in range(len(stack))}


def merged(rule, deltas, momentum=None, weights=WEIGHTS):
    delta_R = {k: jnp.stack([d[k] for d in deltas]) for k in deltas[0]}
    run = jax.jit(merge.merge_leaves, static_argnums=(0, 5))
    states = merge.initial_states(rule, deltas[0], len(deltas), STACKED)
    given = jnp.asarray(weights, jnp.float32), momentum, STACKED
    return run(rule, delta_R, states, *given).direction


def agree(found, expected):
    for key, value in by_layer(found).items():
        np.testing.assert_allclose(value, expected[key], rtol=3e-5, atol=3e-6, err_msg=key)


def test_radial_directional_keeps_the_length_and_averages_embeddings():
    deltas = [draw(r) for r in range(3)]
    found = merged(merge.RadialDirectional(), deltas)
    rule = merging.radial_directional(embeddings=("embed",))
    agree(found, rule([by_layer(d) for d in deltas], WEIGHTS, None))
    mean = np.linalg.norm(sum(w * d["w"] for w, d in zip(WEIGHTS, deltas)))
    assert np.linalg.norm(found["w"]) > 1.3 * mean  # orthogonal directions shorten a mean


def test_radial_directional_takes_the_mean_where_directions_cancel():
    one = draw(3)
    deltas = [one, {k: -x for k, x in one.items()}, {k: 0 * x for k, x in one.items()}]
    found = merged(merge.RadialDirectional(), deltas, weights=[0.25, 0.25, 0.5])
    assert all(np.abs(x).max() < 1e-6 for x in found.values())
    longer = [one, {k: -3 * x for k, x in one.items()}]
    found = merged(merge.RadialDirectional(), longer, weights=[0.5, 0.5])
    agree(found, by_layer({k: -x for k, x in one.items()}))


def test_one_payload_alone_is_the_direction():
    deltas = [draw(r) for r in range(3)]
    found = merged(merge.RadialDirectional(), deltas, weights=[0.0, 0.7, 0.0])
    agree(found, by_layer(deltas[1]))


def test_isotropic_gives_equal_singular_values_and_leaves_vectors():
    mean = draw(5)
    found = merged(merge.Isotropic(), [mean], weights=[1.0])
    agree(found, merging.isotropic([by_layer(mean)], [1.0], None))
    values = np.linalg.svd(found["blocks/w"][2], compute_uv=False)
    before = np.linalg.svd(mean["blocks/w"][2], compute_uv=False)
    np.testing.assert_allclose(values, before.mean(), rtol=1e-5)
    np.testing.assert_array_equal(found["b"], mean["b"])


@pytest.mark.parametrize(
    "strong",
    [{}, {"removal": 5.0, "turn": 5.0, "confidence": 0.01}],
    ids=["within", "at the bounds"],  # the turn stops at the momentum, the removal at `most`
)
@pytest.mark.parametrize("towards", [0.9, 0.1, -0.6], ids=["along", "aside", "against"])
def test_align_of_each_case(towards, strong):
    momentum, other = draw(7), draw(8)
    delta = {k: np.float32(towards) * momentum[k] + np.float32(0.4) * other[k] for k in momentum}
    settings = {"enough": 0.5, "removal": 0.4, "turn": 0.7, "confidence": 2.0, "most": 0.3} | strong
    found = merged(merge.Align(**settings), [delta], momentum, weights=[1.0])
    rule = merging.align(**settings)
    agree(found, rule([by_layer(delta)], [1.0], by_layer(momentum)))


def test_align_before_there_is_a_momentum():
    delta, nothing = draw(9), {k: np.zeros(s, np.float32) for k, s in SHAPES.items()}
    found = merged(merge.Align(), [delta], nothing, weights=[1.0])
    agree(found, by_layer(delta))


def test_a_checkpoint_describes_a_rule():
    from lowcomm_jax.checkpoint.load import describe_method

    described = describe_method(lc.methods.isoloco(5))
    assert described["merge"]["type"] == "Isotropic"
    assert describe_method(lc.methods.diloco(5))["merge"] is None


def test_rules_by_name():
    def made(rule):
        schedule, outer = lc.schedule.Staggered(3), lc.outer.sgd(1.0)
        return lc.methods.Method("by name", schedule, outer, merge=rule)

    assert made("isotropic").merge == merge.Isotropic()
    assert made({"name": "align", "turn": 0.5}).merge == merge.Align(turn=0.5)
    assert "'mode' is unknown: use align, isotropic" in made("mode").problems[0]
    [problem] = made({"name": "radial_directional", "flor": 1}).problems
    assert "radial_directional has the settings floor" in problem and "'flor'" in problem


@dataclasses.dataclass(frozen=True)
class Patient(merge.Merge):
    """The mean; a tensor stays where a region's values sum to less than they did before."""

    def init(self, regions):
        return {"largest": jnp.full(regions, -jnp.inf), "rounds": jnp.zeros((), jnp.int32)}

    def update(self, delta_RxN, state, weight_R, kind, momentum):
        share_R = weight_R / jnp.sum(weight_R)
        mean = jnp.tensordot(share_R, delta_RxN, axes=1)
        sum_R = jnp.sum(delta_RxN, axis=tuple(range(1, delta_RxN.ndim)))
        grows = jnp.all((sum_R >= state["largest"]) | (weight_R == 0))
        largest = jnp.where(weight_R > 0, jnp.maximum(sum_R, state["largest"]), state["largest"])
        return merge.Merged(mean, {"largest": largest, "rounds": state["rounds"] + 1}, grows)


def pulled_apart(params, batch, rng):
    """A leaf and the two layers of a stack have the gradients that the batch says."""
    pull = batch["x"][0]
    layers = params["blocks"]["w"].sum(axis=1)
    return params["a"].sum() * pull[0] + layers[0] * pull[1] + layers[1] * pull[2]


def test_a_rule_with_a_state_keeps_tensors_where_they_are():
    """By hand: a leaf and two layers of a stack, of which some do not move in the second round."""
    method = lc.methods.Method(
        "patient", lc.schedule.Staggered(1), lc.outer.heavy_ball(1.0, 0.5), merge=Patient()
    )
    start = {"a": np.zeros(3, np.float32), "blocks": {"w": np.zeros((2, 2), np.float32)}}
    engine, state = started(method, 2, optax.sgd(1.0), pulled_apart, start, stacked=STACKED)
    assert state.merge[0]["blocks/w"]["largest"].shape == (2, 2)
    # Delta is the pull itself. Momentum of what moves: 1, then 1.5; of what stays it stays 1.
    first = {"x": np.float32([[[1, 1, 1]], [[1, 1, 1]]])}
    state, _ = engine.step(state, first)
    state, _ = engine.step(state, {"x": np.float32([[[1, 0.5, 2]], [[1, 2, 1]]])})
    np.testing.assert_allclose(state.anchor["a"][0], [-2.5] * 3)
    np.testing.assert_allclose(state.anchor["blocks/w"][0], [[-1, -1], [-3, -3]])
    trace = optax.tree.get(state.outer[0], "trace")
    np.testing.assert_allclose(trace["blocks/w"][0], [[1, 1], [2, 2]])
    np.testing.assert_allclose(state.merge[0]["blocks/w"]["largest"], [[2, 4], [4, 2]])
    assert state.merge[0]["blocks/w"]["rounds"].tolist() == [2, 2]
    state, _ = engine.step(state, first, [False, False])
    assert state.merge[0]["a"]["rounds"].tolist() == 2, "a round of nobody is none"
    for name, value in lc.region_params(state)["blocks"].items():
        expected = np.asarray(state.anchor[f"blocks/{name}"][0]) - np.float32([[1], [1]])
        np.testing.assert_allclose(value, np.stack([expected] * 2))


@dataclasses.dataclass(frozen=True)
class ByInverseNorm(merge.Merge):
    """The mean of directions: regions weigh by 1 / norm, those below `least` not at all."""

    least: float = 0.0
    reads = "norms"

    def weigh(self, norm_R, state, weight_R, kind):
        counts = norm_R > self.least
        return jnp.where(counts, weight_R / jnp.where(counts, norm_R, 1.0), 0.0), state

    def update(self, delta_RxN, state, weight_R, kind, momentum):
        return merge.Merged(delta_RxN[0], state)


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_rule_that_reads_norms_weighs_each_tensor(slots, codec):
    """By hand: a leaf and two layers of a stack; one layer's norms are all too small."""
    method = lc.methods.Method(
        "inverse", lc.schedule.Staggered(1), lc.outer.average(), codec=codec, merge=ByInverseNorm(1)
    )
    mesh = lc.make_mesh(region=slots, devices=jax.devices()[:slots])
    given = {"mesh": mesh, "stacked": STACKED, "weights": [1.0, 3.0]}
    start = {"a": np.zeros(4, np.float32), "blocks": {"w": np.zeros((2, 4), np.float32)}}
    engine, state = started(method, 2, optax.sgd(1.0), pulled_apart, start, **given)
    # Norms of four equal values are twice the pull: weights 1/2 and 3/8, 1/2 and 3/16, none.
    batch = {"x": np.float32([[[1, 1, 0.3]], [[4, 8, -0.4]]])}
    state, _ = engine.step(state, batch)
    expected = {"a": [-(1 / 2 * 1 + 3 / 8 * 4) / (1 / 2 + 3 / 8)] * 4}
    expected["blocks/w"] = [[-(1 / 2 * 1 + 3 / 16 * 8) / (1 / 2 + 3 / 16)] * 4, [0] * 4]
    for name, value in expected.items():
        np.testing.assert_allclose(state.anchor[name][0], value, rtol=1e-6)
    if codec is None:
        assert state.counters.bytes_sent.tolist() == [48 + 3 * 4] * 2


@dataclasses.dataclass(frozen=True)
class Close(ByInverseNorm):
    """Who is close counts: a rule that never looks at the weights that it is given."""

    def weigh(self, norm_R, state, weight_R, kind):
        return norm_R < 100.0, state


def test_weights_of_a_careless_rule_do_not_bring_back_who_was_left_out():
    """Bools are weights, too; an absent region and one that is not finite count nothing."""

    def pulled(params, batch, rng):
        return params["a"].sum() * batch["x"][0]

    method = lc.methods.Method("close", lc.schedule.Staggered(1), lc.outer.average(), merge=Close())
    start = {"a": np.zeros(3, np.float32)}
    engine, state = started(method, 4, optax.sgd(1.0), pulled, start, skip_nonfinite=False)
    batch = {"x": np.float32([[1], [2], [3], [np.nan]])}
    present = [True, True, False, True]
    state, _ = engine.step(state, batch, present)
    np.testing.assert_allclose(state.anchor["a"][0], [-1.5] * 3, rtol=1e-6)
