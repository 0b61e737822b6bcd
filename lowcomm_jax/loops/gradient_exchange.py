"""Inner steps of methods that exchange gradients at every step (`signal="gradient"`: DDP, DeMo).

The reduced gradient takes the place of the mean pseudo-gradient, and the inner optimizer (behind
the method's outer rule, if it has one) that of the outer rule. Every region that takes part adopts
the result. Values cross between regions inside the inner program, at every step.

All gradients are taken at the anchor, in the dtype of the parameters. A region that was absent
keeps its old parameters until it takes part again; they never enter the mean. Its buffers are its
own old ones in that step; those of role `average` are averaged after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowcomm_jax.exchange import Traffic, two_shot
from lowcomm_jax.history import Event
from lowcomm_jax.params.layout import Layout
from lowcomm_jax.params.sharding import optimizer_shardings
from lowcomm_jax.setup import Setup
from lowcomm_jax.state.train_state import Inner, TrainState, flight_key
from lowcomm_jax.sync.compiler_options import inner_options
from lowcomm_jax.sync.finish import AtTheEnd
from lowcomm_jax.sync.initial_state import Making, Optimizers, anchor_axis, start
from lowcomm_jax.sync.part_checks import optimizer_problems
from lowcomm_jax.sync.round_functions import (
    AnchorState,
    Contributions,
    RoundFunctions,
    Senders,
    select,
)
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.sync_loop import FAR, Loop, Ran, Steps, with_step
from lowcomm_jax.train.inner_step import InnerStep, empty_log, gradient_norm, squeeze, step_key

PyTree = Any


def make_gradient_program(step: InnerStep, functions: RoundFunctions):
    """Build the program of the gradient-exchanging steps, not yet jitted.

    Returns:
      `block(carry, frozen, batches, region_keys, takes_part, weight, n, single)`, which runs the
      first n (traced) of S staged steps.

      - `carry`: (inner, anchor, outer state, codec state).
      - `batches`: leaves `[R, S, b, ...]`; `takes_part`: bool `[R, S]`.
      - `weight`: float32 `[R]`, or None for the tokens of each step; `single`: static.
      - Its result: (carry, metrics `[R, S]`, or `[R]` with `single`).
    """
    layout = step.layout
    averaged = [n for n, role in zip(layout.names, layout.roles) if role == "average"]

    def region_gradients(inner, anchor, frozen, batch, key):
        rng = step_key(key, inner.step)
        # What all who took part in the last step have; parameters of the others are older.
        params = {k: anchor[k][0].astype(x.dtype) for k, x in inner.params.items()}
        grads, buffers, metrics = step.gradients(params, inner.buffers, frozen, batch, rng)
        metrics["grad_norm"] = gradient_norm(grads)
        return grads, buffers, metrics

    gradients = functions.regions.lift(region_gradients, (0, None, None, 0, 0))
    outer_step = by_optimizer(step, functions).outer_step

    def one(carry, frozen, batch, region_keys, takes_part, weight):
        inner, anchor, outer, codec_state = carry
        grads, buffers, metrics = gradients(inner, anchor, frozen, batch, region_keys)
        weight = metrics["tokens"] if weight is None else weight
        sent = functions.encode(_in_fp32, (grads,), codec_state, Senders(takes_part, weight))
        arrived = Contributions(sent["payload"], sent["weight"])
        held, moved = outer_step(AnchorState(anchor, outer), arrived, {})
        anchor, outer = held.anchor, held.outer
        # Without a batch, or with a bad one, a region's own state stays as it was.
        moves_R = takes_part
        if step.setup.skip_nonfinite:
            moves_R = moves_R & jnp.isfinite(metrics["grad_norm"])
        buffers = select(moves_R, buffers, inner.buffers)
        if averaged:
            chosen = {k: buffers[k] for k in averaged}
            buffers |= functions.average_buffers(chosen, sent["weight"], takes_part)
        params = {
            k: jnp.broadcast_to(anchor[k], x.shape).astype(x.dtype) for k, x in inner.params.items()
        }
        inner = Inner(
            params=select(takes_part, params, inner.params),
            buffers=buffers,
            opt=inner.opt,
            step=inner.step + 1,
            tokens=inner.tokens,
        )
        kept = {"left_out": sent["left_out"], "delta_norm": sent["delta_norm"]}
        kept |= {k: jnp.broadcast_to(v, takes_part.shape) for k, v in moved.items()}
        return (inner, anchor, outer, sent["codec_state"]), {**metrics, **kept}

    def block(carry, frozen, batches, region_keys, takes_part, weight, n, single=False):
        first = jax.tree.map(lambda x: x[:, 0], batches)
        args = (frozen, first, region_keys, takes_part[:, 0], weight)
        log = empty_log(jax.eval_shape(one, carry, *args)[1], takes_part.shape[1])

        def body(i, loop):
            carry, log = loop
            batch = jax.tree.map(lambda x: x[:, i], batches)
            carry, new = one(carry, frozen, batch, region_keys, takes_part[:, i], weight)
            return carry, jax.tree.map(lambda buffer, v: buffer.at[:, i].set(v), log, new)

        carry, log = jax.lax.fori_loop(0, n, body, (carry, log))
        return carry, squeeze(log) if single else log

    return block


def by_optimizer(step: InnerStep, functions: RoundFunctions) -> RoundFunctions:
    """The functions with the inner optimizer as their outer rule, behind the method's own."""

    def update(grads, state, params):
        tree = step.layout.tree
        updates, state = step.setup.optimizer.update(tree(grads), state, tree(params))
        return step.layout.select(updates, "train"), state

    rule = optax.GradientTransformation(step.init, update)
    return dataclasses.replace(functions, rules_K=((rule, None),))


def _in_fp32(grads: PyTree) -> PyTree:
    return {k: g.astype(jnp.float32) for k, g in grads.items()}


@dataclasses.dataclass(frozen=True)
class GradientPrograms:
    """`round_programs.Family` of gradient exchange.

    Attributes:
      gradient_program: compiled (`make_gradient_program`).
    """

    gradient_program: Callable

    @staticmethod
    def check_optimizer(setup: Setup, layout: Layout) -> tuple[list[str], bool]:
        """An optimizer steps along the mean gradient, of which no region has the loss."""
        no_loss = (
            f"and regions of {setup.method.name} exchange gradients, no losses, so that each would "
            "step along another: use an optimizer that needs no loss, or a method of rounds"
        )
        return optimizer_problems(setup, layout, no_loss)

    @classmethod
    def make(
        cls, setup: Setup, step: InnerStep, functions: RoundFunctions, inner_out: PyTree
    ) -> GradientPrograms:
        """The program of gradient exchange."""
        del inner_out
        return cls(
            jax.jit(
                make_gradient_program(step, functions),
                donate_argnums=0,
                static_argnames="single",
                compiler_options=inner_options(setup.placed),
            )
        )

    def initial_state(self, programs: RoundPrograms, params: PyTree, making: Making) -> TrainState:
        """Regions have no optimizer of their own: its state is that of the anchor."""

        def optimizers(programs, params_R, anchor, making) -> Optimizers:
            del params_R
            layout, (_, axis) = programs.step.layout, anchor_axis(programs)
            shapes = programs.fragments.like(0).items()
            like = layout.tree({k: jax.ShapeDtypeStruct(x.shape, "float32") for k, x in shapes})
            given = like, layout.tree(programs.specs), programs.regions, axis
            out = optimizer_shardings(programs.setup.optimizer, *given)
            init = jax.jit(jax.vmap(programs.step.init), out_shardings=out)
            return (), (making.run(init, out, anchor),)

        return start(programs, params, making, optimizers)

    def loop(self, programs: RoundPrograms, weights: str | np.ndarray) -> GradientLoop:
        return GradientLoop(programs, weights)


class GradientLoop(Loop):
    """The loop of gradient exchange: all is done inside the inner steps, nothing behind them."""

    every_step = True

    def next_event(self, state: TrainState, most: int = FAR) -> int:
        return most

    def inner_steps(self, state: TrainState, steps: Steps) -> Ran:
        block = steps.block
        takes_part = np.ones((self.count, block.capacity), bool)
        for i, mask in enumerate(steps.masks):
            takes_part[:, i] = mask
        carry, metrics = self.programs.family.gradient_program(
            (state.inner, state.anchor, state.outer[0], state.codec[0]),
            state.frozen,
            block.batches,
            steps.keys,
            takes_part,
            None if self.by_tokens else self.weights,
            np.int32(block.steps),
            single=steps.single,
        )
        inner, anchor, outer, codec = carry
        counters, events = state.counters.copy(), []
        for step, mask in enumerate(steps.masks, int(counters.step) + 1):
            traffic = self.traffic(mask)
            counters.count_send(0, step)
            counters.count_bytes(traffic.sent, traffic.received)
            counters.last_landed[0], counters.staleness[0] = step, 0
            key = flight_key(0, step)
            events.append(Event.of_send(step, 0, key, mask, traffic, {}))
            events.append(Event.of_landing(step, 0, key, mask, 0, {}))
        changes = {"inner": inner, "anchor": anchor, "outer": (outer,), "codec": (codec,)}
        away = ~takes_part[:, : block.steps]
        presence = {"away": away} if away.any() else {}
        return Ran(state.replace(**changes, counters=counters), metrics, events, presence)

    def traffic(self, mask: np.ndarray) -> Traffic:
        """Bytes of one gradient exchange among the regions of `mask`, bool `[R]`."""
        traffic = self.programs.exchange.traffic(self.fragments.like(0), mask)
        return traffic.plus(two_shot(self.programs.averaged_bytes(), mask))

    def after(
        self, state: TrainState, steps: int, mask: np.ndarray
    ) -> tuple[TrainState, list[Event]]:
        return with_step(state, int(state.counters.step) + steps, behind=0), []

    def finish(
        self, state: TrainState, participants: AtTheEnd = None
    ) -> tuple[TrainState, list[Event]]:
        """The state as it is: leaves equal the anchor in regions that made the last step."""
        return state, []
