"""DiLoCoX on bases that all regions share, against its NumPy re-derivation."""

import jax
import numpy as np
import oracle
import pytest
from compilations import compilations
from engine.dilocox_cases import (
    CALM,
    RANK,
    SHAPES,
    check,
    codec,
    make_engine,
    run_oracle,
    train,
)

import lowcomm_jax as lc


def shared(*args, **settings):
    return lc.methods.dilocox(*args, **{"codec": codec(), "shared_basis": True, **settings})


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("regions, devices", [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_projections_on_what_landed_last(regions, devices, delay):
    method = shared(3, rank=RANK, delay=delay, adaptive=False, outer=CALM["engine"])
    mask = np.ones((17, regions), bool)
    if regions > 1:
        mask[5, 1] = mask[8, 0] = False
        mask[11] = False  # a round that nobody sends in: bases are used in turn all the same
    _, seen, batches = train(method, regions, 17, mask, devices=devices)
    run = run_oracle(method, batches, 3, CALM["oracle"], delay=delay, participants=mask)
    check(seen, run, tolerance=1e-4)


def test_int4_factors():
    wire = codec(factors=lc.compression.Integer(4, block=None))
    method = shared(3, codec=wire, rank=RANK, adaptive=False, outer=CALM["engine"])
    _, seen, batches = train(method, 2, 10)
    rounded, exact = (
        run_oracle(method, batches, 3, CALM["oracle"], **rounding)
        for rounding in ({"rounding": oracle.int4_rows}, {})
    )
    check(seen, rounded, tolerance=1e-3)
    with pytest.raises(AssertionError):
        check(seen, exact, tolerance=1e-3)


def test_the_mesh_does_not_matter_to_the_last_bit():
    method = shared(3, rank=RANK, adaptive=False)
    (one, *_), (two, *_) = (train(method, 2, 14, devices=d, finish=True) for d in (1, 2))
    assert len(one.bases[0]) == 2
    jax.tree.map(np.testing.assert_array_equal, (one.anchor, one.bases), (two.anchor, two.bases))


def test_a_bucket_compiles_once_and_bytes_are_those_announced():
    rule = {"window": 1, "energy": 0.5, "probe": 2}
    method = shared(6, rank=RANK, adaptive=rule, outer=CALM["engine"])
    engine = make_engine(method, 2)
    params = oracle.make_params(shapes=SHAPES)
    batches = oracle.make_batches(steps=40, regions=2, shapes=SHAPES)
    stream = [oracle.step_batch(batches, t) for t in range(1, 41)]
    states, levels = [engine.init(params) for _ in range(2)], set()

    def run():
        state, history = engine.run(states.pop(), stream)
        sent = [e.nbytes for e in history.events if e.kind == "send"]
        # To the one other region.
        assert state.counters.bytes_sent.tolist() == [sum(sent)] * 2
        for flight in state.in_flight.values():
            levels.add(int(flight.level))
            buffers = sum(x[0].nbytes for x in jax.tree.leaves(flight.payload))
            assert buffers == method.codec.at(int(flight.level)).nbytes(params)
        levels.update(sent)
        return state.anchor

    assert compilations(run) > 0
    assert len(levels) > 2, "only one bucket was used, so this test could not fail"
    assert compilations(run) == 0
