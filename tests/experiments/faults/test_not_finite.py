"""Parameters that stop being finite: of the right region, at the right step, once."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from experiments.faults.fault import Fault
from experiments.faults.simulated import NotFinite


@dataclasses.dataclass(frozen=True)
class Inner:
    params: dict


@dataclasses.dataclass(frozen=True)
class State:
    inner: Inner

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


def test_which_regions_at_which_steps():
    faults = [Fault(4, "nan", 2), Fault(9, "nan", 0), Fault(9, "nan", 1), Fault(9, "stop", 2, 3)]
    seen, spoils = [], NotFinite.of(faults, here=[1, 2])
    spoils.witness = seen.append
    assert [spoils.next(step) for step in (0, 4, 9)] == [4, 9, math.inf]
    state = State(Inner({"w": jnp.ones((2, 3)), "b": jnp.ones((2,))}))
    assert spoils.apply(state, 0, 3) is state and not seen
    state = spoils.apply(state, 3, 4)
    for x in state.inner.params.values():
        assert np.isnan(x[1]).all() and np.isfinite(x[0]).all()
    assert spoils.apply(state, 4, 8) is state and seen == [4]
    state = spoils.apply(state, 8, 9)
    assert all(np.isnan(x).all() for x in state.inner.params.values()) and seen == [4, 9]


def test_a_job_without_them_applies_none():
    assert NotFinite.of([Fault(4, "nan", 2)], here=[0]).next(0) == math.inf
