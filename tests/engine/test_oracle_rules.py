"""Merge rules, rules per fragment and what rules are told, against NumPy, in the whole loop."""

import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from engine.test_oracle import (
    SGD,
    STEPS,
    absent,
    anchors,
    close,
    compare,
    fragments,
    pattern,
    train,
)
from oracle import merging
from oracle_runs import started, stream

import lowcomm_jax as lc
from lowcomm_jax import merge, outer
from lowcomm_jax.methods.base import Method
from lowcomm_jax.schedule import Arrivals, Staggered

K = 3
KEYS = fragments(K)
PATTERN = pattern(KEYS)


def streaming(rule=None, outer_rule=None, overlap=2, codec=None, **answers):
    return Method(
        name="streaming with a rule",
        schedule=Staggered(5, K, overlap),
        outer=outer_rule or outer.nesterov(0.4, 0.8),
        landing=lc.landing.blend(0.3),
        merge=rule,
        codec=codec,
        pattern=PATTERN,
        **answers,
    )


SETTINGS = {  # the oracle's
    "fragments": KEYS,
    "period": 5,
    "overlap": 2,
    "alpha": 0.3,
    "outer": oracle.Nesterov(0.4, 0.8),
}


def compared(method, regions=3, **changes):
    compare(method, oracle.run_streaming, regions, **{**SETTINGS, **changes})


class Trace(merge.Align):
    """Reads `trace`, where `optax.sgd` keeps its momentum."""

    momentum = "trace"


RULES = {
    "radial": (merge.RadialDirectional(), merging.radial_directional()),
    "isotropic": (merge.Isotropic(), merging.isotropic),
    "align": (Trace(enough=0.5), merging.align(enough=0.5)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_merge_rule_in_the_loop(name):
    (rule, re_derived), weights = RULES[name], [0.2, 0.5, 0.3]
    mask = absent(STEPS, 3, ((3, 1), (8, 0), (10, 2)))
    compared(streaming(rule), merge=re_derived, participants=mask, weights=weights)


def test_a_merge_rule_reads_what_a_codec_delivers():
    """bf16 payloads: the rule sees them decoded, each region's by itself."""

    def wire(x):
        return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))

    method = streaming(merge.RadialDirectional(), codec="bf16")
    compared(method, merge=merging.radial_directional(), wire=wire, finish=False)


def test_rules_that_read_payloads_cost_a_gather():
    dense, sent = 4 * oracle.SIZE, {}
    for name, rule in {"mean": None, **{n: r for n, (r, _) in RULES.items()}}.items():
        engine, state = started(streaming(rule), 3, SGD[1])
        state, _ = engine.run(state, stream(5))
        sent[name] = int(state.counters.bytes_sent[0])
    assert sent["isotropic"] == sent["align"] == sent["mean"]
    assert sent["radial"] == 2 * dense  # to both others; a reduction sends 2 (R - 1) / R
    assert sent["mean"] == pytest.approx(4 / 3 * dense, abs=8)


def test_a_region_left_out_does_not_reach_a_rule():
    """A NaN payload has weight 0; norms and directions of the others stay what they were."""
    method = streaming(merge.RadialDirectional())
    batches = oracle.make_batches(steps=5, regions=3)
    mask = np.ones((5, 3), bool)
    mask[1:, 2] = False
    given = SETTINGS | {"merge": merging.radial_directional(), "participants": mask}
    run = oracle.run_streaming(oracle.make_params(), batches, inner=SGD[0], **given)
    steps = stream(5)
    steps[1]["y"][2] = np.nan  # region 2 is not finite when fragment 1 leaves after step 3
    engine, state = started(method, 3, SGD[1], skip_nonfinite=False)
    state, _ = engine.run(state, steps)
    for key in KEYS[1]:
        close(anchors(state)[key][0], run.at(5).anchors[0][key], key)


def test_each_fragment_has_its_own_outer_rule():
    rates = [(0.4, 0.8), (0.7, 0.5), (0.2, 0.3)]
    method = streaming(outer_rule=tuple(outer.nesterov(*r) for r in rates))
    compared(method, outer=[oracle.Nesterov(*r) for r in rates])


def test_each_fragment_has_its_own_landing_rule():
    alphas = [0.3, 0.9, 0.0]
    method = Method(
        name="own landings",
        schedule=Staggered(5, K, 2),
        outer=outer.nesterov(0.4, 0.8),
        landing=tuple(lc.landing.blend(a) if a else None for a in alphas),
        pattern=PATTERN,
    )
    compared(method, 2, alpha=alphas)


def noting():
    """An outer rule that keeps what it was told, and a plain step."""

    def init(params):
        del params
        return {name: jnp.zeros((), jnp.int32) for name in ("fragment", "round", "step")}

    def update(delta, state, params=None, *, fragment, round, step, **extra):
        del state, params, extra
        told = {"fragment": fragment, "round": round, "step": step}
        return {k: -0.5 * d for k, d in delta.items()}, told

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize("overlap", [0, 2])
def test_rules_are_told_fragment_round_and_step(overlap):
    method = streaming(outer_rule=noting(), overlap=overlap)
    engine, state = started(method, 2, SGD[1])
    landings = {}
    for t, batch in enumerate(stream(13, 2), 1):
        state, metrics = engine.step(state, batch)
        for event in metrics["events"]:
            if event.kind == "land":
                told = {k: int(v[0]) for k, v in state.outer[event.fragment].items()}
                landings.setdefault(event.fragment, []).append(told)
                assert told["step"] == t and told["fragment"] == event.fragment
    assert {p: [x["round"] for x in rounds] for p, rounds in landings.items()} == {
        0: [0, 1, 2],
        1: [0, 1, 2] if overlap == 0 else [0, 1],
        2: [0, 1],
    }


def test_a_round_of_arrivals_is_each_contribution():
    method = Method(
        name="arrivals", schedule=Arrivals(2, (1.0, 1.0, 1.0)), outer=noting(), base="received"
    )
    engine, state = started(method, 3, SGD[1])
    for batch, last in zip(stream(4), (0, 2, 2, 5), strict=True):
        state, _ = engine.step(state, batch)
        assert int(state.outer[0]["round"][0]) == last


class TwoFragments(Arrivals):
    """Fragment 0 after even arrivals, 1 after odd ones."""

    fragments = 2

    def due(self, step, counters):
        fragment = (step // self.period) % 2
        return tuple(send._replace(fragments=(fragment,)) for send in super().due(step, counters))


def test_received_is_refreshed_for_the_fragment_that_lands_alone():
    """What a region has of the other fragment is as old as it was: its next Delta is right."""
    method = Method(
        name="two fragments, received",
        schedule=TwoFragments(2, (1.0, 1.0)),
        outer=outer.sgd(0.5),
        base="received",
        pattern=["a|s", "b|c"],
    )
    keys = [["a", "s"], ["b", "c"]]
    _, seen, batches = train(method, SGD[1], 2, steps=9)
    regions = oracle.loop.Regions(oracle.make_params(), SGD[0], 2)
    theta = oracle.make_params()
    received = [oracle.make_params() for _ in range(2)]
    for t in range(1, 10):
        regions.step(batches, t)
        if t % 2 == 0:
            part = keys[(t // 2) % 2]
            deltas = [{k: received[r][k] - regions.values[r][k] for k in part} for r in range(2)]
            for delta in deltas:
                for k in part:
                    theta[k] = theta[k] - 0.5 * delta[k]
            for r in range(2):
                for k in part:
                    regions.values[r][k] = np.array(theta[k])
                    received[r][k] = np.array(theta[k])
        for k in theta:
            close(seen[t - 1][0][k][0], theta[k], f"step {t} anchor {k}")
            for r in range(2):
                close(seen[t - 1][1][k][r], regions.values[r][k], f"step {t} region {r} {k}")


def test_what_is_handed_out_may_differ_from_the_anchor():
    """Regions get Theta - 0.3 m; the anchor itself stays, and is what is measured against."""

    def look_ahead(anchor, outer_state):
        momentum = optax.tree.get(outer_state, "trace")
        return {k: anchor[k] - 0.3 * momentum[k] for k in anchor}

    method = Method(
        name="look ahead",
        schedule=Staggered(3),
        outer=outer.heavy_ball(0.5, 0.8),
        hands_out=look_ahead,
    )
    _, seen, batches = train(method, SGD[1], 2, steps=7)
    regions = oracle.loop.Regions(oracle.make_params(), SGD[0], 2)
    theta = oracle.make_params()
    m = {k: np.zeros_like(x) for k, x in theta.items()}
    for t in range(1, 8):
        regions.step(batches, t)
        if t % 3 == 0:
            for k in theta:
                delta = np.mean([theta[k] - regions.values[r][k] for r in range(2)], axis=0)
                m[k] = 0.8 * m[k] + delta
                theta[k] = theta[k] - 0.5 * m[k]
                for r in range(2):
                    regions.values[r][k] = np.asarray(theta[k] - 0.3 * m[k])
        for k in theta:
            close(seen[t - 1][0][k][0], theta[k], f"step {t} anchor {k}")
            for r in range(2):
                close(seen[t - 1][1][k][r], regions.values[r][k], f"step {t} region {r} {k}")
