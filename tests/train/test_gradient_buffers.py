"""State of a region in a step of ddp that it does not make, or whose batch is bad."""

import numpy as np
import pytest
from params.test_roles import NORM, norm_loss, norm_roles
from params.tiny_runs import R, engine, scalars, train

import lowcomm_jax as lc

AWAY = 1


@pytest.mark.parametrize("bad", [False, True], ids=["absent", "nan"])
def test_a_region_that_makes_no_step_of_ddp_keeps_its_own_state(bad):
    """A batch that is not finite would make running statistics NaN for good."""
    table = np.arange(1.0, 1 + 3 * R).reshape(3, R)
    if bad:
        table[1, AWAY] = np.nan
    one = engine(norm_loss, lc.methods.ddp(), roles=norm_roles("local"))
    present = None if bad else lambda t: [t != 2 or r != AWAY for r in range(R)]
    buffers = [train(one, NORM, scalars(table[:n]), present).inner.buffers for n in (1, 2)]
    assert buffers[1]["mean"][AWAY] == buffers[0]["mean"][AWAY]
    assert buffers[1]["seen"].tolist() == [5, 4, 5]
