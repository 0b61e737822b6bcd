"""What the engine benchmarks time: a model with batches, a plain loop, the engine's loop.

`interleave` times alternatives side by side: all variants of a comparison run in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm_jax as lc
from experiments.progress import Work
from lowcomm_jax.models import build
from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.models.model import Model
from lowcomm_jax.schedule.base import Send

NEVER = 10**6  # H of methods that are not to synchronise
T = TypeVar("T")


def random_batches(model: Any, steps: int, shape: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    """So many batches of random tokens of this shape, always the same."""
    rng = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    return [{"tokens": rng.integers(0, vocabulary, shape, np.int32)} for _ in range(steps)]


class BenchWork(NamedTuple):
    """The model and batches that are timed.

    Attributes:
      batch: sequences of a region's step.
      context: tokens of a sequence.
      steps: of one run.
    """

    model: Model
    params: Any
    batch: int
    context: int
    steps: int

    def batches(self, regions: int) -> list[dict[str, np.ndarray]]:
        return random_batches(self.model, self.steps, (regions, self.batch, self.context + 1))

    @property
    def tokens(self) -> int:
        """Tokens of one region's steps."""
        return self.steps * self.batch * self.context


SIZES = {
    # batch, context, and the model: `reference` is the work PyTorch simulators were timed on.
    "small": (4, 32, {"layers": 2, "width": 64, "heads": 4, "head_dim": 16, "mlp_width": 176}),
    "reference": (
        8,
        128,
        {"layers": 4, "width": 256, "heads": 4, "head_dim": 64, "mlp_width": 683},
    ),
}


def make_work(size: str, steps: int) -> BenchWork:
    """A model of a size in `SIZES`, its random parameters, and so many steps a region."""
    batch, context, shape = SIZES[size]
    config = TransformerConfig(vocab_size=512, kv_heads=4, max_seq_len=context, **shape)
    model = build(config)
    params = jax.jit(model.init)(jax.random.key(0))
    return BenchWork(model, params, batch, context, steps)


def plain_loop(work: BenchWork):
    """A hand-written jit + Optax loop of the same model; returns a function that runs it once."""
    optimizer = optax.adamw(3e-4)

    @jax.jit
    def step(params, opt, batch):
        (loss, _), grads = jax.value_and_grad(work.model.loss_fn, has_aux=True)(
            params, batch, jax.random.key(0)
        )
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    step = jax.jit(step, donate_argnums=(0, 1))
    state = [jax.tree.map(jnp.copy, work.params), optimizer.init(work.params)]
    batches = [jax.tree.map(lambda x: x[0], b) for b in work.batches(1)]

    def run():
        for batch in batches:
            *state[:], loss = step(*state, batch)
        return loss

    return run


def one_device_engine(model: Any, method, regions: int, **settings: Any) -> lc.Engine:
    """An engine of AdamW on one device."""
    mesh = lc.make_mesh(devices=jax.local_devices()[:1])
    return lc.Engine(model.loss_fn, optax.adamw(3e-4), method, regions, mesh=mesh, **settings)


def inner_arguments(engine: lc.Engine, state: Any, batches: list[Any]) -> list[Any]:
    """Arguments of the compiled program that makes an inner step of every batch."""
    staged = engine.place(jax.tree.map(lambda *x: np.stack(x, axis=1), *batches))
    return [state.inner, state.frozen, staged, engine.region_keys, None, np.int32(len(batches))]


def held_bytes(tree: Any) -> int:
    """Bytes of the arrays that a state holds on devices."""
    return sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def engine_loop(work: BenchWork, method, regions: int, replicas: str = "map"):
    """The same steps through `Engine.run`; returns a function that runs them once."""
    engine = one_device_engine(work.model, method, regions, replicas=replicas)
    state = [engine.init(work.params)]
    batches = work.batches(regions)

    def run():
        state[0], _ = engine.run(state[0], batches)
        return state[0].anchor, state[0].inner.step

    return run


def exchange_loop(engine: lc.Engine, holder: list):
    """A function that sends and lands the first fragment of the state in `holder`."""
    loop, everyone = engine.sync_loop(holder[0]), np.ones(engine.regions.count, bool)

    def run():
        state = loop.send(holder[0], Send((0,)), 1, everyone, [])
        holder[0] = loop.land_now(state, [])
        return holder[0].anchor, holder[0].inner.params

    return run


def interleave(variants: Mapping[T, Callable[[], Any]], repeats: int) -> dict[T, list[float]]:
    """Seconds of each variant over `repeats` rounds, one after the other within a round.

    Load on the machine then affects all variants alike, and ratios within a round can be compared.

    Args:
      variants: name -> function; its clock stops when the arrays that it returns are ready.
    """
    seconds: dict[T, list[float]] = {name: [] for name in variants}
    parts = [(round_, name) for round_ in range(1 + repeats) for name in variants]
    with Work("timed", len(parts)) as work:
        for done, (round_, name) in enumerate(parts):
            work.at(name if isinstance(name, str) else " ".join(map(str, name)), done)
            start = time.perf_counter()
            jax.block_until_ready(variants[name]())
            if round_:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(slower: list[float], faster: list[float]) -> float:
    """Median over rounds of seconds(`slower`) / seconds(`faster`)."""
    return statistics.median(a / b for a, b in zip(slower, faster))


def median(values: list[float]) -> float:
    return statistics.median(values)
