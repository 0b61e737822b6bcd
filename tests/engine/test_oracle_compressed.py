"""SparseLoCo, MuLoCo, PULSELoCo, DeMo and decoupled momentum against their NumPy re-derivation."""

import numpy as np
import optax
import oracle
import pytest
from engine import test_oracle
from engine.test_oracle import ADAMW, CUT, SGD, STEPS, absent, anchors, fragments, train
from oracle.codecs import e3m0

import lowcomm_jax as lc

# Chunks of up to 4 x 4: "a" is cut into 5 of 3 x 1, "b" into 7 of one, "c" into 2 of 2 x 3.
SMALL = {"k": 2, "block": 4}
WHO = {
    "all": {},
    "absent": {"skip": True},
    "weighted": {"skip": True, "weights": [0.2, 0.5, 0.3]},
}
CASES = [(1, "all"), (2, "all"), (3, "absent"), (3, "weighted")]


def taking_part(regions, skip=False, weights=None):
    """Keywords of a run."""
    mask = absent(STEPS, regions) if skip and regions > 1 else None
    return {"participants": mask, "weights": weights and weights[:regions]}


def compare(method, run, regions, who, inner=SGD, **settings):
    """Train in rounds of 4, finish, and compare everything with the oracle's run."""
    settings |= taking_part(regions, **WHO[who])
    state, want, _ = test_oracle.compare(method, run, regions, inner, period=4, **settings)
    return state, want.finished


def check_residuals(residual, trees, least=1e-3):
    for r, tree in enumerate(trees):
        for key, want in tree.items():
            np.testing.assert_allclose(
                residual[key][r], want, rtol=1e-4, atol=1e-5, err_msg=f"region {r} {key}"
            )
    assert max(np.abs(x).max() for x in residual.values()) > least, "nothing is left to compare"


@pytest.mark.parametrize("regions,who", CASES)
def test_sparseloco(regions, who):
    method = lc.methods.sparseloco(4, decay=0.9, **SMALL)
    state, end = compare(method, oracle.run_sparseloco, regions, who, decay=0.9, **SMALL)
    check_residuals(state.codec[0].residual, end.extra["residuals"])


def test_sparseloco_averaged_over_senders():
    method = lc.methods.sparseloco(4, mean="senders", **SMALL)
    state, end = compare(method, oracle.run_sparseloco, 3, "absent", senders=True, **SMALL)
    check_residuals(state.codec[0].residual, end.extra["residuals"])
    who = taking_part(3, **WHO["absent"])
    batches = oracle.make_batches(steps=STEPS, regions=3)
    given = {"period": 4, "inner": SGD[0], "finish": True, **who, **SMALL}
    over_all = oracle.run_sparseloco(oracle.make_params(), batches, **given).finished
    apart = max(np.abs(x - over_all.anchors[0][key]).max() for key, x in end.anchors[0].items())
    assert apart > 1e-3, "the two means do not differ here"


def test_sparseloco_as_published():
    """k = 64 of 64 x 64: all of these small leaves travel, in 2 bits."""
    method = lc.methods.sparseloco(4)
    state, end = compare(method, oracle.run_sparseloco, 3, "absent", inner=ADAMW)
    check_residuals(state.codec[0].residual, end.extra["residuals"])


@pytest.mark.parametrize("bits,regions,who", [(2, 2, "all"), (2, 3, "weighted"), (4, 3, "absent")])
def test_muloco(bits, regions, who):
    method = lc.methods.muloco(4, bits)
    state, end = compare(method, oracle.run_muloco, regions, who, bits=bits)
    check_residuals(state.codec[0].residual, end.extra["residuals"])


def test_muloco_two_shot():
    """On leaves of a usual size the mean of every slice is quantised a second time."""
    method, steps = lc.methods.muloco(4, 4), 12
    how = {"steps": steps, "shapes": {"b": (6,), "v": (30, 24), "w": (24, 36)}, "period": 4}
    how |= {"participants": absent(steps, 3), "finish": False}
    test_oracle.compare(method, oracle.run_muloco, 3, slices=3, **how)
    with pytest.raises(AssertionError):
        test_oracle.compare(method, oracle.run_muloco, 3, **how)


# Rates at which some changes pass the gate, and others wait.
FINE = (oracle.Momentum(2e-4, 0.8), optax.sgd(2e-4, momentum=0.8))
PLACES = {"scarce": {"k": 1, "block": 4}, "for all": {}}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("regions,who", CASES)
def test_pulseloco(regions, who, places):
    method = lc.methods.pulseloco(4, **PLACES[places])
    state, end = compare(method, oracle.run_pulseloco, regions, who, inner=FINE, **PLACES[places])
    check_residuals(state.codec[0].residual, end.extra["residuals"], least=1e-4)
    sent = np.concatenate([x.ravel() for x in end.extra["sent"]])
    assert 0.1 < sent.mean() < 0.9, "everything travels, or nothing"


def test_pulseloco_differs_from_a_choice_without_a_gate():
    plain = {"name": "topk", "k": 256, "error_feedback": 1.0}
    with pytest.raises(AssertionError):
        compare(lc.methods.pulseloco(4, codec=plain), oracle.run_pulseloco, 3, "absent", inner=FINE)


@pytest.mark.parametrize("regions", [2, 3])
def test_streaming_in_e3m0(regions):
    codec = {"name": "e3m0", "reduce": "all_gather"}
    outer = lc.outer.nesterov(0.4, 0.9)
    method = lc.methods.streaming_diloco(5, 3, 2, 0.3, pattern=CUT, codec=codec, outer=outer)
    settings = {"fragments": fragments(3), "period": 5, "overlap": 2, "alpha": 0.3, "wire": e3m0}
    settings |= {"outer": oracle.Nesterov(0.4, 0.9), "participants": absent(STEPS, regions)}
    test_oracle.compare(method, oracle.run_streaming, regions, **settings)


@pytest.mark.parametrize("regions,who", CASES)
def test_decoupled_momentum(regions, who):
    method = lc.methods.decoupled_momentum(4, decay=0.8, **SMALL)
    state, end = compare(method, oracle.run_decoupled, regions, who, decay=0.8, **SMALL)
    check_residuals(state.codec[0].residual, end.extra["residuals"])


@pytest.mark.parametrize("regions,who", CASES)
def test_decoupled_momentum_as_coded(regions, who):
    method = lc.methods.decoupled_momentum(4, "as_coded", decay=0.7, **SMALL)
    state, end = compare(method, oracle.run_decoupled_as_coded, regions, who, decay=0.7, **SMALL)
    check_residuals(state.codec[0].feedback.residual, end.momentum)
    spread = max(np.ptp(x, axis=0).max() for x in anchors(state).values())
    assert regions == 1 or spread > 1e-3, "anchors that agree do not show whose Delta was used"


def demo(params, batches, inner, **given):
    """The oracle's, whose optimizer is its own."""
    return oracle.run_demo(params, batches, lr=0.02, weight_decay=0.1, **given)


@pytest.mark.parametrize("regions,who", CASES)
def test_demo(regions, who):
    settings = {"k": 6, "decay": 0.3}
    given = settings | taking_part(regions, **WHO[who])
    inner = (None, optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.02)))
    state, run, _ = test_oracle.compare(
        lc.methods.demo(**settings), demo, regions, inner, finish=False, **given
    )
    nearest = [np.abs(oracle.flatten(s.extra["direction"])).min() for s in run.snapshots[1:]]
    assert min(nearest) > 1e-5, "the sign of such a value is a matter of rounding"
    check_residuals(state.codec[0].residual, run.last.momentum)


def test_the_mean_gradient_goes_through_the_outer_rule():
    """A method of one's own: the mean gradient is clipped in front of the inner optimizer."""
    clip = optax.clip_by_global_norm(0.5)
    schedule = lc.methods.ddp().schedule
    method = lc.methods.Method("clipped", schedule, outer=clip, signal="gradient")
    _, seen, _ = train(method, optax.sgd(0.1), 3)
    flat = [oracle.flatten({k: x[0] for k, x in anchor.items()}) for anchor, _ in seen]
    np.testing.assert_allclose(np.linalg.norm(np.diff(flat, axis=0), axis=1), 0.05, rtol=1e-4)
