"""Jobs that reduce payloads in slices end with the bits of the mesh's two-shot reduction."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
import pytest
from regions.faults import vanish
from regions.party import KINDS
from regions.test_lost_regions import sitting_out
from regions.test_same_numbers import RULE, assert_same, expected
from regions.together import CUT, batches, engine, in_jobs, rows, train, values

import lowcomm_jax as lc
from lowcomm_jax.store.wire import parse

INT4 = {"name": "int4", "error_feedback": 0.9, "reduce": "two_shot"}
METHODS = {
    "dense": lambda: lc.methods.diloco(4, RULE),
    "int4": lambda: lc.methods.diloco(4, RULE, codec=INT4),
    "small blocks": lambda: lc.methods.diloco(4, RULE, codec={**INT4, "block": 4}),
    "late": lambda: lc.methods.streaming_diloco(6, 1, 2, 0.3, outer=RULE, codec="e3m0"),
    "streaming": lambda: lc.methods.streaming_diloco(
        6, 3, 2, 0.3, pattern=CUT, outer=RULE, codec="e3m0"
    ),
}
ABSENT = {3: sitting_out, 4: lambda step: [True, *sitting_out(step)]}
CASES = [
    ("dense", 3, "store"),
    ("int4", 3, "store"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [("dense", 4, "peers"), ("int4", 4, "peers"), ("streaming", 4, "store")]
    ),
]


@pytest.mark.parametrize("name, regions, kind", CASES)
def test_anchors_and_parameters_are_those_of_the_mesh(name, regions, kind, between):
    """With everyone, without one region, and with one alone."""
    together = expected(METHODS[name](), regions, 14, ABSENT[regions])
    make = between(regions, kind=KINDS[kind])
    jobs = in_jobs(make, METHODS[name](), regions, 14, ABSENT[regions])
    assert_same(jobs, together, False)


# Of all but the first, devices hold values or columns of every slice.
DEALT = {"b": (7,), "u": (24,), "v": (9, 32), "w": (10, 20)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, shapes", [("dense", oracle.SHAPES), ("int4", oracle.SHAPES), ("small blocks", DEALT)]
)
def test_regions_of_different_meshes_have_one_anchor(name, shapes, between):
    devices = jax.devices()
    meshes = [
        lc.make_mesh(devices=devices[:1]),
        lc.make_mesh(fsdp=2, devices=devices[1:3]),
        lc.make_mesh(fsdp=2, tensor=2, devices=devices[3:7]),
    ]
    jobs = in_jobs(between(3), METHODS[name](), 3, 9, meshes=meshes, shapes=shapes)
    for other in jobs[1:]:
        for (anchor, _), (expected_anchor, _) in zip(other, jobs[0], strict=True):
            jax.tree.map(np.testing.assert_array_equal, anchor, expected_anchor)


@pytest.mark.parametrize("name", ["int4", pytest.param("dense", marks=pytest.mark.slow)])
def test_who_is_killed_between_the_halves_counts_as_absent(name, brief):
    """Survivors go on as if it had sat out from the payload on that it did not average."""
    regions, steps, dies = 3, 13, 8
    data = batches(steps, regions)
    together = expected(METHODS[name](), regions, steps, lambda t: [1, 1, t < dies])

    def job(region):
        made = brief(regions)(region)
        if region == 2:
            doomed(made, dies)
        one = engine(METHODS[name](), regions, made)
        try:
            return train(one, [rows(batch, region) for batch in data])
        except Killed:
            return None

    with ThreadPoolExecutor(regions) as pool:
        *survivors, killed = pool.map(job, range(regions))
    assert killed is None
    assert_same([job[:1] for job in survivors], together[:1], False)
    jax.tree.map(np.testing.assert_array_equal, survivors[0][1][0], survivors[1][1][0])


class Killed(Exception):
    """The job is gone."""


def doomed(made, step):
    """A job that dies while it averages its slice of what was sent at this step."""
    start = made.start

    def last_start(name, arrays, *, terms, reduction=None, **rest):
        if terms.get("step") == step:
            reduction = Dying(made, reduction)
        start(name, arrays, terms=terms, reduction=reduction, **rest)

    made.start = last_start


class Dying:
    def __init__(self, made, reduction):
        self._made, self._reduction = made, reduction

    def __getattr__(self, name):
        return getattr(self._reduction, name)

    def average(self, *args):
        vanish(self._made)
        raise Killed


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_as_announced(kind, between):
    regions, made, moved = 3, {}, {}

    def job(region):
        made[region] = between(regions, kind=KINDS[kind])(region)
        moved[region] = heard(made[region]._context.transport)
        one = engine(METHODS["dense"](), regions, made[region])
        with jax.numpy_dtype_promotion("standard"):
            state = one.init(oracle.make_params())
            state, _ = one.run(state, [rows(batch, region) for batch in batches(4, regions)])
        return state.counters

    with ThreadPoolExecutor(regions) as pool:
        clocks = list(pool.map(job, range(regions)))
    values = sum(x.size for x in oracle.make_params().values())
    each = 4 * -(-values // regions)
    for region, clock in enumerate(clocks):
        # Two shares of every payload but its own.
        assert moved[region] == [each] * 2 * (regions - 1)
        assert clock.bytes_received.tolist() == [2 * 2 * each]
        assert clock.bytes_sent.tolist() == [2 * 2 * each]
    counts = [made[region].counts() for region in range(regions)]
    if kind == "peers":  # through a store, one upload serves all
        assert sum(c["sent"] for c in counts) == sum(c["received"] for c in counts)


def heard(transport):
    """Bytes of values in every payload that is fetched from now on."""
    get, sizes = transport.get, []

    def spied(*args):
        data = get(*args)
        sizes.extend(x.nbytes for name, x in parse(data)[1].items() if name.endswith("flat"))
        return data

    transport.get = spied
    return sizes


def test_a_run_is_continued_with_slices_under_way(between):
    """All jobs end with payloads in flight, and start again."""
    regions, steps, ends = 3, 14, 7
    together = expected(METHODS["late"](), regions, steps)
    data = batches(steps, regions)
    first = [None] * regions

    def before(region):
        first[region] = between(regions)(region)
        one = engine(METHODS["late"](), regions, first[region])
        with jax.numpy_dtype_promotion("standard"):
            state = one.init(oracle.make_params())
            state, _ = one.run(state, [rows(batch, region) for batch in data[:ends]])
        assert state.in_flight
        return state

    def after(region, state):
        with jax.numpy_dtype_promotion("standard"):
            one = engine(METHODS["late"](), regions, between(regions)(region))
            one.init(oracle.make_params())
            one.reconnect(state)
            state, _ = one.run(state, [rows(batch, region) for batch in data[ends:]])
            return values(state), values(one.finish(state))

    with ThreadPoolExecutor(regions) as pool:
        states = list(pool.map(before, range(regions)))
        list(pool.map(lambda made: made.pause(), first))
        for made in first:
            vanish(made)
        jobs = list(pool.map(after, range(regions), states))
    assert_same(jobs, together, False)
