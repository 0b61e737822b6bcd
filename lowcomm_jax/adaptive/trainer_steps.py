"""The inner steps of several trainers: one trainer after the other, or all in one program.

`TrainerSteps` takes a `Task` a trainer and gives its new state and history. Stacked trainers are
replicas of one program; others go through `Engine.run`, one by one, with the same results.
(The AdLoCo paper runs trainers in parallel; which order is faster depends on the machine.)

Stacked: row r of trainer i's leaves `[R, ...]` is row r T + i of the stack's `[RT, ...]`. So a
region's trainers lie where the region does. To the program of inner steps a trainer is one more
replica in the region's slot of the mesh (`Regions.replicas`). With `map` the replicas run one after
the other inside the program and give what they give alone, bit for bit. With `vmap` they are
batched, equal but for rounding, and each waits for the one with the most microbatches.

The tasks of stacked trainers may differ: counts, strides and steps are traced, per trainer. A
program has one size of microbatches. Where trainers need several sizes, one call is made
for each, in which the trainers of another size make no step. So what is compiled depends on the
size and on how many trainers live.

Between segments trainers are states of their own, which exchange, merge and are saved as ever.
Stacking and unstacking copies their inner state, once between two events.

`step_bytes` says how much memory a step of a given microbatch needs, by the compiler's analysis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.adaptive.plans import StepPlan
from lowcomm_jax.engine import Engine, Participants
from lowcomm_jax.history import Event, History, readable, with_pace
from lowcomm_jax.mesh.arrays import place
from lowcomm_jax.mesh.offload import HOST
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.params.layout import Layout
from lowcomm_jax.planner.memory import compiled_memory
from lowcomm_jax.refusals import UNFIT, microbatch_problems
from lowcomm_jax.refused import refuse
from lowcomm_jax.state.train_state import Inner, TrainState
from lowcomm_jax.sync.round_programs import RoundPrograms, accumulating_program, inner_shardings
from lowcomm_jax.sync.sync_loop import SyncLoop
from lowcomm_jax.train import batch_blocks
from lowcomm_jax.train.batch_blocks import BatchBlock, BlockStager, MicrobatchCut

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Task:
    """What one trainer does in a segment.

    Attributes:
      state: before it; is donated.
      batches: host batches `[R, b, ...]` of its steps, all of one size.
      steps: how many; those of all trainers are equal.
      plan: of every step.
    """

    state: TrainState
    batches: Iterator[PyTree]
    steps: int
    plan: StepPlan


class TrainerLoops(Protocol):
    """The loops over events of an engine's trainers."""

    def of(self, trainer: int, state: TrainState) -> SyncLoop:
        """The loop of a trainer, by its number."""
        ...

    def landed(
        self, ran: dict[int, tuple[TrainState, History]]
    ) -> dict[int, tuple[TrainState, History]]:
        """What all trainers have come to, when everything that is due has landed."""
        ...


@dataclasses.dataclass(frozen=True)
class OneLoop:
    """On one mesh trainers share a loop, and what is due lands by itself."""

    engine: Engine

    def of(self, trainer: int, state: TrainState) -> SyncLoop:
        del trainer
        return self.engine.sync_loop(state)

    def landed(
        self, ran: dict[int, tuple[TrainState, History]]
    ) -> dict[int, tuple[TrainState, History]]:
        return ran


class TrainerSteps:
    """The inner steps of all trainers of an engine.

    Args:
      engine: of every trainer.
      stacked: whether trainers share a program, the last one left excepted; else every one runs
        as `Engine.run` does, and all share the program of a microbatch size.
      loops: of the trainers.
    """

    def __init__(self, engine: Engine, stacked: bool, loops: TrainerLoops):
        self.engine, self._stacked, self._loops = engine, stacked, loops
        self._made: dict[tuple[Layout, int], StackPrograms] = {}
        self._warm: set[int] = set()

    def _together(self, trainers: int) -> int:
        """How many of so many trainers share a program."""
        return trainers if self._stacked else 1

    def ready(self, trainers: int) -> bool:
        """Whether everything that so many trainers need is compiled."""
        return self._together(trainers) in self._warm

    def warm(
        self, states: Sequence[TrainState], batch: PyTree, sizes: Sequence[int]
    ) -> list[TrainState]:
        """Compile for microbatches of `sizes`, without training; see `Engine.warm`.

        Also compiles what stacks of fewer trainers are copied by.

        Args:
          states: of all living trainers; are donated, use the returned ones.
        """
        together = self._together(len(states))
        self._warm.add(together)
        if together == 1:
            first, *others = states
            return [self.engine.warm(first, batch, sizes), *others]
        inners = [state.inner for state in states]
        for fewer in range(2, len(states)):
            programs = self._programs(states[0], fewer)
            programs.split(programs.join(inners[:fewer]))
        programs = self._programs(states[0], len(states))
        stack = _stacked(programs, inners)
        for size in sizes:
            plan = StepPlan(size, size, (1,) * self.engine.regions.count)
            one = BlockStager([batch_blocks.repeated(batch, size)], self.engine.block, size).take(1)
            blocks, plans = ([x] * len(states) for x in (one._replace(steps=0), plan))
            stack, _ = self._run_blocks(programs, stack, states[0].frozen, blocks, plans, 0)
        return _unstacked(programs, stack, states)

    def run(
        self, tasks: dict[int, Task], participants: Participants
    ) -> dict[int, tuple[TrainState, History]]:
        """Train every trainer on all its batches, with the sends and landings that follow."""
        if self._together(len(tasks)) > 1:
            return self._loops.landed(dict(zip(tasks, self._run_stacked(tasks, participants))))
        ran = {}
        for number, task in tasks.items():
            loop, plan = self._loops.of(number, task.state), task.plan
            cut = MicrobatchCut(plan.microbatch, plan.counts_R)
            ran[number] = self.engine.run_on(loop, task.state, task.batches, participants, cut)
        return self._loops.landed(ran)

    def nbytes(self, state: TrainState, batch: PyTree, microbatch: int, trainers: int) -> int:
        """Bytes of a device that `trainers` such states need; see `step_bytes`.

        Of stacked ones the larger of what steps need, and what stacking needs.
        """
        together = self._together(trainers)
        needed = step_bytes(self.engine, state, batch, microbatch, together)
        whole = device_bytes(state.replace(counters=None))
        if together == 1:
            return needed + whole * (trainers - 1)
        return max(needed, (whole + device_bytes(state.inner)) * trainers)

    def _run_stacked(
        self, tasks: dict[int, Task], participants: Participants
    ) -> Iterator[tuple[TrainState, History]]:
        work = list(tasks.values())
        states, steps = [task.state for task in work], work[0].steps
        loops = [self._loops.of(number, task.state) for number, task in tasks.items()]
        records = [History(int(state.counters.step)) for state in states]
        stagers = [BlockStager(t.batches, self.engine.block, t.plan.microbatch) for t in work]
        plans = [task.plan for task in work]
        while steps:
            dues = [loop.next_event(state) for loop, state in zip(loops, states)]
            stretch = min(steps, *dues)
            states, made = self._stretch(states, stagers, plans, stretch)
            found = self._events(loops, states, participants, stretch)
            for i, (record, (states[i], events)) in enumerate(zip(records, found)):
                for n, metrics in made[:-1]:
                    record.add(n, metrics[i], [])
                n, metrics = made[-1]
                record.add(n, metrics[i], events)
            steps -= stretch
        return zip(states, records)

    def _programs(self, state: TrainState, trainers: int) -> StackPrograms:
        key = state.layout, trainers
        if key not in self._made:
            programs = self.engine.sync_loop(state).programs
            self._made[key] = StackPrograms(programs, self.engine.runner.keys, trainers)
        return self._made[key]

    def _stretch(
        self, states, stagers: Sequence[BlockStager], plans: Sequence[StepPlan], steps: int
    ):
        """Inner steps between two events: (states, records).

        A record is (steps, metrics of every trainer by name).
        """
        like, records = states[0], []
        programs, done = self._programs(like, len(states)), int(like.counters.step)
        stack = _stacked(programs, [state.inner for state in states])
        room = min(self.engine.block // plan.stride for plan in plans)
        for first in range(done, done + steps, room):
            n = min(room, done + steps - first)
            blocks = [stager.take(n) for stager in stagers]
            stack, metrics = self._run_blocks(programs, stack, like.frozen, blocks, plans, first)
            records.append((n, metrics))
        return _unstacked(programs, stack, states), records

    def _run_blocks(
        self,
        programs: StackPrograms,
        stack: Inner,
        frozen: dict[str, jax.Array],
        blocks: Sequence[BatchBlock],
        plans: Sequence[StepPlan],
        done: int,
    ) -> tuple[Inner, list[dict[str, Any]]]:
        """Run a block of every trainer after `done` steps: a call for each size of microbatches."""
        trainers = len(blocks)
        metrics: list[dict[str, Any]] = [{}] * trainers
        steps = range(done + 1, done + blocks[0].steps + 1)
        active_RxS = self.engine.runner.active(steps, blocks[0].capacity)
        active = None if active_RxS is None else np.repeat(active_RxS, trainers, axis=0)
        pace = {} if active_RxS is None else {"active": active_RxS}
        for size in sorted({plan.microbatch for plan in plans}):
            chosen = [plan.microbatch == size for plan in plans]
            numbers = _numbers(plans, chosen, blocks[0].steps)
            batches = self.engine.place(_stacked_batches(blocks, chosen), trainers, cut=True)
            given = (stack, frozen, batches, programs.region_keys, active, *numbers)
            stack, found = programs.steps(*given)
            found = readable(found)
            for i in np.flatnonzero(chosen):
                own = {name: TrainerRows(x, i, trainers) for name, x in found.items()}
                metrics[i] = with_pace(own, pace, single=False)
        return stack, metrics

    def _events(
        self, loops: Sequence[SyncLoop], states, participants: Participants, steps: int
    ) -> list[tuple[TrainState, list[Event]]]:
        """What follows the last of these steps: (state, events) of every trainer."""
        step = int(states[0].counters.step) + steps
        mask = self.engine.runner.mask(participants, step)
        return [loop.after(state, steps, mask) for loop, state in zip(loops, states)]


class StackPrograms:
    """Jitted functions over T stacked trainers; nothing is compiled yet.

    Attributes:
      join: T inner states `[R, ...]` -> the stack's, `[RT, ...]`; split: the way back.
      steps: `accumulating_program` over the stack.
      region_keys: of every region T times, uint32 `[RT, W]`, on the mesh.
    """

    def __init__(self, programs: RoundPrograms, keys: np.ndarray, trainers: int):
        setup, layout = programs.setup, programs.step.layout
        lies = inner_shardings(setup, layout, layout.train_shapes(), programs.specs)
        self.join = jax.jit(_join, out_shardings=lies)
        self.split = jax.jit(
            lambda stack: tuple(_part(stack, i, trainers) for i in range(trainers)),
            out_shardings=(lies,) * trainers,
        )
        self.steps = accumulating_program(setup, programs.step, programs.specs, trainers)
        keys = np.repeat(keys, trainers, axis=0)
        self.region_keys = place(keys, programs.regions.sharding(REGION))


@dataclasses.dataclass(frozen=True)
class TrainerRows:
    """One trainer's part `[R, C]` of a stacked metric `[RT, C]`, fetched when it is read."""

    stacked: jax.Array
    trainer: int
    trainers: int

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        del copy  # a read-only view, as of any array on a device
        return np.asarray(self.stacked)[self.trainer :: self.trainers].astype(dtype, copy=False)


# -- stacking ----------------------------------------------------------------------------------


def _join(inners: Sequence[Inner]) -> Inner:
    def one(*leaves):
        count = len(leaves) * leaves[0].shape[0]
        return jnp.stack(leaves, axis=1).reshape(count, *leaves[0].shape[1:])

    return jax.tree.map(one, *inners)


def _part(stack: Inner, trainer: int, trainers: int) -> Inner:
    def one(x):
        return x.reshape(x.shape[0] // trainers, trainers, *x.shape[1:])[:, trainer]

    return jax.tree.map(one, stack)


def _stacked(programs: StackPrograms, inners: Sequence[Inner]) -> Inner:
    """Stack, and free the inner states: no result of another shape could take their memory over."""
    stack = programs.join(inners)
    for leaf in jax.tree.leaves(inners):
        leaf.delete()
    return stack


def _unstacked(programs: StackPrograms, stack: Inner, states) -> list[TrainState]:
    inners = programs.split(stack)
    return [state.replace(inner=inner) for state, inner in zip(states, inners, strict=True)]


def _numbers(plans: Sequence[StepPlan], chosen: Sequence[bool], steps: int) -> list[np.ndarray]:
    """Counts, strides and steps, int32 `[RT]` each; trainers not chosen make no step."""
    counts_RxT = np.array([plan.counts_R for plan in plans], np.int32).T
    strides_T = np.array([plan.stride for plan in plans], np.int32)
    steps_T = np.where(chosen, np.int32(steps), np.int32(0))
    shape = counts_RxT.shape
    return [np.broadcast_to(x, shape).reshape(-1) for x in (counts_RxT, strides_T, steps_T)]


def _stacked_batches(blocks: Sequence[BatchBlock], chosen: Sequence[bool]) -> PyTree:
    """Staged batches of all trainers, leaves `[RT, C, m, ...]`; of those not chosen any will do."""
    some = blocks[list(chosen).index(True)]
    parts = [block.batches if own else some.batches for block, own in zip(blocks, chosen)]

    def one(*leaves):
        stacked_RxT = np.stack(leaves, axis=1)
        return stacked_RxT.reshape(-1, *leaves[0].shape[1:])

    return jax.tree.map(one, *parts)


# -- memory ------------------------------------------------------------------------------------


def step_bytes(
    engine: Engine, state: TrainState, batch: PyTree, microbatch: int, trainers: int = 1
) -> int:
    """Bytes on the fullest device while inner steps of one microbatch size run.

    The compiler's sum of arguments, results and temporaries; the arguments are the inner state of
    the regions that a device holds, and the staged buffer. The state that only sends and landings
    touch comes on top. What sends and landings need themselves, while no activations are alive, is
    not counted. Each call compiles a step and keeps nothing of it.

    Args:
      batch: host batch `[R, b, ...]`; its shapes and dtypes count, its b does not.
      microbatch: m.
      trainers: how many such states are stacked, for one program to step them all.

    Raises:
      ValueError: microbatches the engine cannot run.
    """
    refuse(UNFIT, microbatch_problems(engine.setup, [microbatch]))
    programs, count = engine.sync_loop(state).programs, engine.regions.count * trainers
    placed = (
        None if engine.regions.mesh.size == 1 else engine.regions.sharding(REGION, None, "fsdp")
    )

    def stacked(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=x.sharding)

    def staged(x: Any) -> jax.ShapeDtypeStruct:
        x = np.asarray(x)
        shape = (count, engine.block, microbatch, *x.shape[2:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=placed)

    active = jax.ShapeDtypeStruct((count, engine.block), bool)
    counts = jax.ShapeDtypeStruct((count,), np.int32)
    whole = jax.ShapeDtypeStruct((), np.int32) if trainers == 1 else counts
    needed = compiled_memory(
        accumulating_program(programs.setup, programs.step, programs.specs, trainers),
        jax.tree.map(stacked, state.inner),
        jax.tree.map(_abstract, state.frozen),
        jax.tree.map(staged, batch),
        stacked(engine.runner.region_keys),
        active if engine.method.schedule.uneven else None,
        counts,
        whole,
        whole,
    )
    beside = (state.anchor, state.received, state.outer, state.codec, state.landing)
    return needed["total"] + trainers * device_bytes(beside)


def device_bytes(tree: PyTree) -> int:
    """Bytes of a tree of arrays on one device; what is offloaded to the host does not count."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def _shard_bytes(x: jax.Array) -> int:
    if x.sharding.memory_kind == HOST:
        return 0
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
