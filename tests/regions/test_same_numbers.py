"""A run of several jobs ends with the same bits as the run in one process."""

import dataclasses
import itertools

import jax
import numpy as np
import oracle
import pytest
from engine.dilocox_cases import CALM, SHAPES
from regions.together import CUT, batches, engine, in_jobs, train, values

import lowcomm_jax as lc

RULE = lc.outer.nesterov(0.6, 0.85)
FACTORS = {"name": "low_rank_int4", "least": 1.0}  # the parameters' matrices are small


def streaming(**answers):
    """Streaming DiLoCo with other answers."""
    return dataclasses.replace(
        lc.methods.streaming_diloco(6, 3, 2, 0.3, pattern=CUT, outer=RULE), **answers
    )


METHODS = {
    "local_sgd": lambda: lc.methods.local_sgd(4),
    "diloco": lambda: lc.methods.diloco(4, RULE),
    "streaming": lambda: lc.methods.streaming_diloco(6, 3, 2, 0.3, pattern=CUT, outer=RULE),
    "cocodc": lambda: lc.methods.cocodc(
        6, 3, 2, syncs_per_period=4, taylor=0.5, pattern=CUT, outer=RULE
    ),
    "dilocox": lambda: lc.methods.dilocox(4, FACTORS, 1, outer=RULE),
    "delayed": lambda: lc.methods.delayed_diloco(4),
    "delayed, blocking": lambda: lc.methods.delayed_diloco(4, first_round="blocking"),
    "noloco": lambda: lc.methods.noloco(4, seed=3),
    "gasloc": lambda: lc.methods.gasloc(4, 0.6, 0.3, 0.8, seed=3, codec="int8"),
    "sparseloco": lambda: lc.methods.sparseloco(4),
    "pulseloco": lambda: lc.methods.pulseloco(2, 2, 4),
    "muloco": lambda: lc.methods.muloco(4),
    "muloco in 2 bits": lambda: lc.methods.muloco(4, bits=2),
    "sparse mean": lambda: lc.methods.decoupled_momentum(4, "mean", 4, 4),
    "as coded": lambda: lc.methods.decoupled_momentum(4, "as_coded", 4, 4),
    "isoloco": lambda: lc.methods.isoloco(4),
    "partial updates": lambda: lc.methods.partial_updates(4, lc.roles.Shares("^[ab]$")),
    "roles": lambda: streaming(roles=lc.roles.Shares("^[ab]$")),
    "spes": lambda: lc.methods.spes(2, "^a$", "a", share=0.3, merge_every=4, until=40, donors=1),
    "edit": lambda: lc.methods.edit(2, 0.08, 0.05, outlier=0.8, decay=0.3, warm_up=2, codec="int8"),
    "edit, dense": lambda: lc.methods.edit(2, 0.08, 0.05, outlier=0.8, decay=0.3, warm_up=2),
    "restarted": lambda: lc.methods.restarted_diloco(4, 2),
    "snoo": lambda: lc.methods.snoo(4),
    # A merge rule that reads payloads one by one, rules per fragment, and a look-ahead.
    "radial": lambda: streaming(merge=lc.merge.RadialDirectional()),
    "radial in int4": lambda: streaming(merge=lc.merge.RadialDirectional(), codec="int4"),
    "own rules": lambda: streaming(
        outer=tuple(lc.outer.nesterov(0.5, m) for m in (0.5, 0.7, 0.9)),
        landing=(lc.landing.blend(0.3), None, lc.landing.replay()),
    ),
    "look ahead": lambda: streaming(
        outer=lc.outer.momentum_average(0.6, 0.8), hands_out=lc.outer.look_ahead(0.6, 0.8)
    ),
}


def expected(method, regions, steps, participants=None, **kwargs):
    return train(engine(method, regions, **kwargs), batches(steps, regions), participants)


def own_anchors(name):
    """Whether each region of a method in `METHODS` has an anchor of its own."""
    return METHODS[name]().anchors == "per_region"


def assert_same(jobs, together, own_anchors):
    for region, job in enumerate(jobs):
        for (anchor, params), (all_anchors, all_params) in zip(job, together, strict=True):
            for name, value in anchor.items():
                row = region if own_anchors else 0
                np.testing.assert_array_equal(value[0], all_anchors[name][row], name)
            for name, value in params.items():
                np.testing.assert_array_equal(value[0], all_params[name][region], name)


QUICK = [
    ("diloco", 3),
    ("streaming", 2),
    ("cocodc", 3),
    ("dilocox", 2),
    ("delayed, blocking", 3),
    ("noloco", 3),
    ("gasloc", 3),
    ("edit", 3),
    ("pulseloco", 3),
    ("muloco in 2 bits", 3),
    ("roles", 3),
    ("spes", 3),
    ("radial", 3),
    ("as coded", 3),
]
SLOW = [
    pytest.param(name, regions, marks=pytest.mark.slow)
    for name in METHODS
    for regions in (2, 3)
    if (name, regions) not in QUICK
]


def test_regions_of_one_and_of_two_devices(between):
    """Payloads have a format of their own, whatever lies where; the inner sums are another's."""
    meshes = [
        lc.make_mesh(devices=jax.devices()[:1]),
        lc.make_mesh(fsdp=2, devices=jax.devices()[1:3]),
    ]
    together = expected(METHODS["diloco"](), 2, 14)
    jobs = in_jobs(between(2), METHODS["diloco"](), 2, 14, meshes=meshes)
    for at in range(2):
        for name, anchor in jobs[0][at][0].items():
            np.testing.assert_array_equal(anchor, jobs[1][at][0][name], name)
            np.testing.assert_allclose(anchor[0], together[at][0][name][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name, regions", [*QUICK, *SLOW])
def test_anchors_and_parameters_are_those_of_one_process(name, regions, between):
    together = expected(METHODS[name](), regions, 14)
    jobs = in_jobs(between(regions), METHODS[name](), regions, 14)
    assert_same(jobs, together, own_anchors(name))


def test_weights_of_norms_are_those_of_a_mesh_that_reduces(between):
    """Jobs get all payloads, and devices of one mesh each sum a slice of scaled ones."""
    apart = lc.make_mesh(region=3, devices=jax.devices()[:3])
    together = expected(METHODS["edit, dense"](), 3, 14, mesh=apart)
    assert_same(in_jobs(between(3), METHODS["edit, dense"](), 3, 14), together, own_anchors=False)


@pytest.mark.parametrize("name", ["streaming", "noloco"])
def test_leaves_below_fp32(name, between):
    """A job keeps what rounding takes from the values it takes over, as one process does."""
    narrow = ("a", "c")
    together = train(engine(METHODS[name](), 2), batches(14, 2), narrow=narrow)
    jobs = in_jobs(between(2), METHODS[name](), 2, 14, narrow=narrow)
    assert_same(jobs, together, own_anchors(name))
    assert {k: x.dtype.name for k, x in jobs[0][0][1].items() if k in narrow}["a"] == "bfloat16"


@pytest.mark.slow
def test_rank_and_period_adapt_to_the_same_numbers(between):
    """DiLoCoX's AdaGradCmp: what every job decides of the mean's rank is what one process does."""
    regions, steps = 2, 21
    rule = {"window": 1, "energy": 0.6, "shortest": 1, "floor": 1, "probe": 2}

    def method():
        return lc.methods.dilocox(6, FACTORS, 4, adaptive=rule, outer=CALM["engine"])

    one = engine(method(), regions)
    with jax.numpy_dtype_promotion("standard"):
        state = one.init(oracle.make_params(shapes=SHAPES))
        state, history = one.run(state, batches(steps, regions, SHAPES))
        together = values(state), values(one.finish(state))
    sends = [event for event in history.events if event.kind == "send"]
    gaps = {b.step - a.step for a, b in itertools.pairwise(sends)}
    assert len({event.nbytes for event in sends}) > 2 and len(gaps) > 2
    jobs = in_jobs(between(regions), method(), regions, steps, shapes=SHAPES)
    assert_same(jobs, together, False)


IN_FRAGMENTS = {
    "streaming": lambda: lc.methods.streaming_diloco(4, 3, 1, 0.3, outer=RULE),
    "gossip": lambda: dataclasses.replace(
        lc.methods.noloco(4, seed=3), schedule=lc.schedule.Staggered(4, fragments=3)
    ),
}


@pytest.mark.parametrize("name", IN_FRAGMENTS)
def test_fragments_of_rows_of_one_leaf(name, between):
    """Every row of leaf `c` is in another fragment."""
    method, told = IN_FRAGMENTS[name], {"stacked": ("c",)}
    together = expected(method(), 2, 10, **told)
    jobs = in_jobs(between(2), method(), 2, 10, **told)
    assert_same(jobs, together, name == "gossip")
