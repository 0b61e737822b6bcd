"""What an evaluation compiles, before there is anything to evaluate."""

import jax
import numpy as np
import optax
import oracle
import pytest
from compilations import compilations
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from experiments.train.evaluation import Evaluator

R, N, T, WORDS = 2, 6, 3, 5


class Data:
    """Sequences of one document each."""

    def __len__(self):
        return N

    def batches(self, size, count):
        tokens = np.random.default_rng(0).integers(0, WORDS, (count, size, T + 1), np.int32)
        document = np.broadcast_to(np.arange(size, dtype=np.int32)[:, None], (count, size, T))
        return {"tokens": tokens, "mask": np.ones(document.shape, np.float32), "document": document}


class Model:
    def logits(self, params, tokens):
        scale = sum(x.mean() for x in jax.tree.leaves(params))
        return scale * jax.nn.one_hot(tokens, WORDS)


@pytest.mark.parametrize("per_region", [False, True])
def test_it_compiles_without_running_and_then_runs_without_compiling(per_region):
    """So a region that comes back is not held by an evaluation, neither then nor later."""
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    one = lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(4), R, mesh=mesh)
    state = one.init(oracle.make_params())
    made = Evaluator(Model(), Data(), mesh, sequences=N, batch=2, per_region=per_region)
    assert compilations(lambda: made.compile(state)) == 2
    assert compilations(lambda: made(state)) == 0
    found = made(state)
    assert len(found.regions) == (R if per_region else 0) and found.anchor > 0
