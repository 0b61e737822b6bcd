"""Random sequences of what can happen to a run: the engine against `loop_model`, step by step.

Hypothesis draws steps and blocks of steps, who takes part, regions that are away for longer, NaN in
a region's gradient, and saves after which the run goes on from the checkpoint. It shrinks what it
finds.
"""

import functools
import tempfile

import jax
import numpy as np
import optax
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from params.tiny_runs import R, engine
from sync.loop_model import ALPHA, LR, MOMENTUM, OUTER_LR, Loop

import lowcomm_jax as lc
from lowcomm_jax.checkpoint import Checkpoints

PERIOD = 4
START = {"a": np.arange(-3, 5, dtype=np.float32), "b": np.linspace(2, -1, 8, dtype=np.float32)}
KINDS = {
    "at once": ((0, 0, 0), False),
    "one delay": ((2, 2, 2), False),
    "delays of their own, residuals": ((0, 1, 3), True),
    "one residual each, late": ((3, 2, 1), True),
}
MASKS = st.tuples(*[st.booleans()] * R)
BAD = st.sampled_from([None, None, None, *range(R)])


def linear_loss(params, batch, rng):
    """Its gradient is what the batch says."""
    return sum(jax.tree.leaves(jax.tree.map(lambda p, g: (p * g[0]).sum(), params, batch)))


@functools.cache
def made(kind):
    """One engine of each kind: programs compile once."""
    delays, feedback = KINDS[kind]
    codec = lc.compression.make("topk", k=1, block=8, error_feedback=1.0) if feedback else None
    method = lc.methods.streaming_diloco(
        PERIOD,
        2,
        delays,
        float(ALPHA),
        pattern=["^a", "^b"],
        outer=lc.outer.nesterov(float(OUTER_LR), float(MOMENTUM)),
        codec=codec,
    )
    return engine(linear_loss, method, optax.sgd(float(LR)), skip_nonfinite=False)


class Machine(RuleBasedStateMachine):
    """A run, and the model of it."""

    @initialize(kind=st.sampled_from(sorted(KINDS)))
    def begin(self, kind):
        self.engine, (delays, self.feedback) = made(kind), KINDS[kind]
        self.state = self.engine.init(START)
        self.model = Loop(START, PERIOD, delays, self.feedback)
        self.away = set()

    def gradients(self, t, bad):
        """Those of step t, by region and fragment: different everywhere, and the same each time."""
        drawn = np.random.default_rng(t).standard_normal((R, 2, 8)).astype(np.float32)
        if bad is not None:
            drawn[bad, t % 2, 3] = np.nan
        return [{"a": g[0], "b": g[1]} for g in drawn]

    def advance(self, what, blocks):
        """`what`: (mask, bad) of each step."""
        first, batches, masks = self.model.t + 1, [], {}
        for t, (mask, bad) in enumerate(what, first):
            gradients = self.gradients(t, bad)
            masks[t] = [taking and r not in self.away for r, taking in enumerate(mask)]
            batches.append(jax.tree.map(lambda *x: np.stack(x)[:, None], *gradients))
            self.model.step(gradients, masks[t])
        if blocks:
            self.state, _ = self.engine.run(self.state, batches, masks.__getitem__)
        else:
            for t, batch in enumerate(batches, first):
                self.state, _ = self.engine.step(self.state, batch, masks[t])
        self.compare()

    def compare(self):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        for number, p in enumerate(START):
            close(self.state.anchor[p][0], self.model.anchor[p], err_msg=f"anchor {p}")
            own = np.stack([theta[p] for theta in self.model.theta])
            close(self.state.inner.params[p], own, err_msg=f"theta {p}")
            assert np.isfinite(self.state.anchor[p]).all()
            if self.feedback:
                residual = np.stack([one[p] for one in self.model.residual])
                close(self.state.codec[number].residual[p], residual, err_msg=f"residual {p}")
        flying = [(f["p"], sorted(f["waiting"])) for f in self.model.flights]
        found = [
            (list(START)[int(f.fragment)], np.flatnonzero(f.takes_part).tolist())
            for f in self.state.in_flight.values()
        ]
        assert sorted(found) == sorted(flying)

    @rule(mask=MASKS, bad=BAD)
    def one_step(self, mask, bad):
        self.advance([(mask, bad)], blocks=False)

    @rule(what=st.lists(st.tuples(MASKS, BAD), min_size=1, max_size=7))
    def several_steps(self, what):
        self.advance(what, blocks=True)

    @rule(steps=st.integers(1, 6))
    def all_is_well(self, steps):
        self.advance([((True,) * R, None)] * steps, blocks=True)

    @rule(region=st.integers(0, R - 1))
    def leaves_or_returns(self, region):
        self.away ^= {region}

    @rule()
    def goes_on_from_a_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
            checkpoints.save(self.state, extra={}, config={})
            self.state = checkpoints.restore(self.engine, START, config={}).state
        self.compare()


@pytest.mark.parametrize(
    "examples",
    [pytest.param(6, id="few"), pytest.param(40, id="many", marks=pytest.mark.slow)],
)
def test_the_engine_does_what_the_model_does(examples):
    """Always the same examples: a failure is a change of ours, and comes again."""
    steps = 8 if examples < 10 else 25
    # To shrink what was found takes minutes: that is for the slow one.
    phases = (Phase.generate,) if examples < 10 else tuple(Phase)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            phases=phases,
        ),
    )
