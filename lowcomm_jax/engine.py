"""The public loop: an `Engine` trains one model in several regions with any method.

`Engine.run` makes a block of inner steps up to the next event (`train`), then `SyncLoop` runs the
sends and landings due there (`sync`). The host decides by the counters in the state. On one mesh it
waits for the device in two places: `Engine.run` keeps about two seconds of steps queued
(`batch_blocks.DispatchLimit`), and schedules that follow measured values fetch them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from lowcomm_jax import history
from lowcomm_jax.history import Event, readable, with_presence
from lowcomm_jax.jobs.job_carrier import JobCarrier
from lowcomm_jax.jobs.round_carrier import carrier_of
from lowcomm_jax.loops import family_of
from lowcomm_jax.mesh.arrays import Part, part_here, place, place_parts
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.mesh.regions import REGION, Regions
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import VirtualClock, drive, follow
from lowcomm_jax.params.layout import Layout, make_layout
from lowcomm_jax.refusals import TITLE, UNFIT, microbatch_problems, refuse_setup
from lowcomm_jax.refused import Refused, refuse
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.settings import with_settings
from lowcomm_jax.setup import DescribedExchange, Setup, takes_settings
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync import initial_state, round_programs
from lowcomm_jax.sync.finish import AtTheEnd
from lowcomm_jax.sync.round_programs import RoundPrograms
from lowcomm_jax.sync.routed_steps import RoutedSteps
from lowcomm_jax.sync.sync_loop import Loop, Steps, SyncLoop
from lowcomm_jax.train import batch_blocks
from lowcomm_jax.train.batch_blocks import (
    BatchBlock,
    BlockStager,
    check_batch,
    check_leaves,
    checked,
)
from lowcomm_jax.train.inner_step import keys_of_regions

PyTree = Any
Participants = Callable[[int], Sequence[bool] | None] | None


class Engine:
    """Trains one model in R regions with any method.

    Attributes:
      setup: every setting.
      regions: `mesh.Regions`, the regions of this job on its mesh.
      method: as given.
      here: int32 `[R]`, numbers of this job's regions.
      clock: `network.VirtualClock`; None without a network, and for a job that is one region.

    Raises:
      ValueError: one message that lists every setting that cannot work, with its fix.
    """

    __doc__ = with_settings(__doc__, Setup)

    @takes_settings(Setup)
    def __init__(self, setup: Setup):
        refuse_setup(setup)
        self._make(setup)

    @classmethod
    def of(cls, setup: Setup) -> Engine:
        """An engine of settings that the caller has had checked (`refusals.refuse_setup`)."""
        engine = cls.__new__(cls)
        engine._make(setup)
        return engine

    def _make(self, setup: Setup) -> None:
        self.setup: Setup = setup
        self.regions: Regions = setup.placed
        self.method: Method = setup.method
        self.block: int = setup.block
        self.carrier: JobCarrier | None = None
        self._described = isinstance(setup.exchange, DescribedExchange)
        if setup.separate and not self._described:
            if not isinstance(setup.exchange, RemoteExchange):
                raise _unopened(setup.exchange)
            self.carrier = JobCarrier(setup.exchange, setup.method)
        # A virtual clock books all regions; between jobs real time passes.
        self.clock: VirtualClock | None = None
        if setup.links is not None and not setup.separate:
            self.clock = VirtualClock(setup.links, seed=setup.seed, record=True)
        self.here: np.ndarray = np.array(setup.here, np.int32)
        self.weights: str | np.ndarray = setup.weights
        if not isinstance(setup.weights, str):
            self.weights = np.asarray(setup.weights, np.float32)[self.here]
        self._batch_sharding = self.regions.sharding(REGION, None, "fsdp")
        self._given_parts = setup.batches == "own" and jax.process_count() > 1
        self._keys = keys_of_regions(setup.seed, self.here)
        self._routed: RoutedSteps | None = None
        if setup.hops is not None:
            self._routed = RoutedSteps(setup.hops, setup.seed, setup.accumulate, setup.regions)
        self._programs: dict[Layout, RoundPrograms] = {}
        self._loops: dict[Layout, Loop] = {}
        self._limits: dict[int | None, batch_blocks.DispatchLimit] = {}  # by microbatch

    def with_carrier(self, carrier: JobCarrier) -> Engine:
        """An engine of the same settings and programs, whose payloads another carrier takes."""
        other = copy.copy(self)
        other.carrier, other._loops = carrier, {}
        return other

    @property
    def plain(self) -> Engine:
        """The engine of every single `TrainState`: this one. (`AdaptiveEngine` has one.)"""
        return self

    # -- state --------------------------------------------------------------------------------

    def init(self, params: PyTree) -> TrainState:
        """Start every region and the anchor from `params` (any pytree of arrays).

        Regions train leaves in their own dtype; anchors are fp32. A region takes over values
        rounded to its leaves, and what rounding takes from them is no progress. (Progress of a
        region that was absent while its anchor moved is known to one rounding of its leaves.) A
        warning tells of trained leaves below fp32, since small inner steps are lost there.

        Raises:
          ValueError: leaves without a valid role; or everything that does not fit the parameters
            (`sync.fit`): fragments, parts of the method that break their contract, and more. The
            message lists all of it, each line with its fix.
        """
        programs = self._loop_for(make_layout(params, self.setup.roles)).programs
        jax.block_until_ready(self.region_keys)  # placed before the first step
        return initial_state.initial_state(programs, params)

    def programs_for(self, layout: Layout, **changes: Any) -> RoundPrograms:
        """The programs for parameters of this layout, the same at each call; nothing is compiled.

        Args:
          changes: of the settings; the programs are then new ones.

        Raises:
          ValueError: see `init`.
        """
        given = layout, family_of(self.method)
        if changes:
            return round_programs.build(dataclasses.replace(self.setup, **changes), *given)
        if layout not in self._programs:
            self._programs[layout] = round_programs.build(self.setup, *given)
        return self._programs[layout]

    def loop_of(self, programs: RoundPrograms) -> Loop:
        """The loop that calls these programs: the method's own, or that of a schedule's acts."""
        if programs.family is not None:
            return programs.family.loop(programs, self.weights)
        carrier = None if self.carrier is None else carrier_of(programs, self.carrier)
        return SyncLoop(programs, self.weights, carrier)

    def _begin(self, state: TrainState) -> Loop:
        """`sync_loop`, at the entry of a call that takes the state away."""
        loop = self.sync_loop(state)
        state.refuse_traced()
        state.refuse_donated()
        return loop

    def sync_loop(self, state: TrainState) -> Loop:
        """The loop over events for this state's parameter layout.

        Raises:
          ValueError: the state was not made by this engine's `init`; or the exchange is described.
        """
        if self._described:
            raise _unopened(self.setup.exchange)
        if not isinstance(state, TrainState):
            raise ValueError(
                f"state is a {type(state).__name__}, no TrainState: start with engine.init(params)"
            )
        loop = self._loops.get(state.layout)
        if loop is None and state.layout not in self._programs:
            raise ValueError(
                "this state was made by another engine: call engine.init(params) first"
            )
        return loop or self._loop_for(state.layout)

    def _loop_for(self, layout: Layout) -> Loop:
        if layout not in self._loops:
            self._loops[layout] = self.loop_of(self.programs_for(layout))
        return self._loops[layout]

    # -- training -----------------------------------------------------------------------------

    def step(
        self,
        state: TrainState,
        batch: PyTree,
        participants: Sequence[bool] | None = None,
        *,
        microbatch: int | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """One inner step in every region, and the sends and landings that follow it.

        Args:
          state: is donated; use the returned one.
          batch: leaves `[R, per-region batch, ...]`.
          participants: bool `[R]`: who takes part in what is sent at this step; None = everyone.
            A region that does not take part keeps training on its own values; its anchor moves like
            everyone's. With gradient exchange (ddp) it makes no step.
          microbatch: see `run`; the batch then comes from the host.

        Returns:
          (state, metrics): `loss`, `grad_norm` and the loss_fn's aux as device arrays `[R]`, and
          `events`, a list of `history.Event`. Where regions run at different speeds, bool `[R]`
          `active` says who made the step; with gradient exchange `away` says who did not.

        Raises:
          ValueError: a state of another engine, or one that was donated before; a batch or mask of
            the wrong shape.
        """
        loop = self._begin(state)
        if microbatch is not None:
            refuse(UNFIT, microbatch_problems(self.setup, [microbatch]))
        check_leaves(batch, self._rows)
        if microbatch is None:
            block = BatchBlock(jax.tree.map(_of_one_step, batch), 1, 1)
        else:
            block = BlockStager([batch], self.block, microbatch).take(1)
        state = self._stepped_through(loop, state, lambda _: participants)
        given = (loop, state, self._placed(block), lambda _: participants)
        state, metrics, events = self._block(*given, single=True)
        return state, {**metrics, "events": events}

    def run(
        self,
        state: TrainState,
        batches: Iterable[PyTree],
        participants: Participants = None,
        *,
        microbatch: int | None = None,
        rounds: int | None = None,
    ) -> tuple[TrainState, history.History]:
        """Train on every batch of `batches`: the compiled fast path.

        Inner steps between two events run inside one program over a staged buffer of fixed length,
        so that a changing distance between events never recompiles. The loop queues about two
        seconds of steps on the device at a time (`batch_blocks.DispatchLimit`), so that a stop
        takes no longer than that.

        An error that `batches` or `participants` raises leaves no state to go on with: the one
        given is donated, and none is returned. Save checkpoints, and call `run` for a part at a
        time.

        Args:
          state: is donated; use the returned one.
          batches: host batches, leaves `[R, per-region batch, ...]`; `run` ends with them. A stream
            may reuse its arrays.
          participants: `step -> bool [R] or None`, see `step`.
          microbatch: m; every batch, of any multiple of m samples, is cut into microbatches of m,
            whose gradients are averaged by tokens. A batch may have another size than the one
            before, up to `block` microbatches: only another m compiles (`warm`).
          rounds: for regions that are jobs at a pace of their own, which have no steps in common:
            train until so many rounds of the run have landed here. `batches` may be endless.

        Returns:
          (state, history): metrics and events of these steps, fetched from the device only when
          the history is read.

        Raises:
          ValueError: a state of another engine, or one that was donated before. Batches of the
            wrong shape, or that cannot be cut. `microbatch` with a method or network that needs
            batches of one size. `rounds` where steps count.
        """
        loop = self._begin(state)
        if rounds is not None:
            if not loop.by_rounds:
                raise ValueError(f"rounds={rounds}: regions count steps here; give so many batches")
            batches = loop.carrier.until_rounds(state, rounds, batches)
        if microbatch is not None:
            refuse(UNFIT, microbatch_problems(self.setup, [microbatch]))
        record = history.History()
        stager = BlockStager(checked(batches, self._rows), self.block, microbatch)
        limit = self._limits.setdefault(microbatch, batch_blocks.DispatchLimit())
        state = self._stepped_through(loop, state, participants)
        while not loop.carrier.paused:
            room = self._room(limit)
            if (block := stager.take(loop.next_event(state, room), room)) is None:
                break
            done, given = int(state.counters.step), (loop, state, self._placed(block), participants)
            state, metrics, events = self._block(*given, single=False)
            record.add(done, block.steps, metrics, events)
            limit.handed_over(block.steps * (block.stride or 1), metrics["loss"])
        owed, loop.owed = loop.owed, []
        if owed:  # of a paused step that no other one follows here
            record.add(int(state.counters.step), 0, {}, owed)
        return state, record

    def _stepped_through(
        self, loop: Loop, state: TrainState, participants: Participants
    ) -> TrainState:
        """The state once the newest step is done, if that was paused (`sync.carrier`)."""
        if not loop.carrier.paused:
            return state
        step = int(state.counters.step)
        mask = mask_here(participants, step, self.setup.regions, self.here)
        return loop.go_on(state, mask)

    def _block(
        self,
        loop: Loop,
        state: TrainState,
        block: BatchBlock,
        participants: Participants,
        single: bool,
    ) -> tuple[TrainState, dict[str, Any], list[Event]]:
        """Inner steps of a block, and the events that follow the last of them.

        Args:
          block: its leaves are on the mesh already.
          single: the block has one step, and metrics lose their step axis.

        Returns:
          (state, metrics, events): metrics leaves `[R, capacity]`, or `[R]` with `single`.
        """
        done = int(state.counters.step)
        steps = range(done + 1, done + block.steps + 1)
        # Before anything is donated: a wrong mask leaves the state as it was.
        asked = steps if loop.every_step else steps[-1:]
        total = self.setup.regions
        masks = [mask_here(participants, t, total, self.here) for t in asked]
        active = active_here(self.setup, steps, block.capacity)
        given = Steps(block, self.region_keys, active, masks, single)
        state, metrics, told, presence = loop.inner_steps(state, given)
        state, events = loop.after(state, block.steps, masks[-1])
        events = [*told, *events]
        if self._routed is not None:
            state, events = self._routed.book(state, steps, block.batches, events)
        if self.clock is not None:
            book(self.clock, steps, events, presence)
        return state, with_presence(readable(metrics), presence, single), events

    @functools.cached_property
    def region_keys(self) -> jax.Array:
        """Words of the regions' keys on the mesh, uint32 `[R, W]`.

        Made at first use, since a mesh may be of absent devices (`aot`).
        """
        return place(self._keys, self.regions.sharding(REGION))

    def warm(
        self, state: TrainState, batch: PyTree, sizes: Sequence[int] | None = None
    ) -> TrainState:
        """Compile the inner steps of `run`, without training.

        Args:
          state: is donated; use the returned one, which holds the same values.
          batch: a host batch like those of `run`; with `sizes` only its first sample counts.
          sizes: every `microbatch` that `run` will be called with; None = batches are not cut.

        Raises:
          ValueError: listing the sizes that cannot work; or the state was donated before.
        """
        loop = self._begin(state)
        refuse(UNFIT, microbatch_problems(self.setup, sizes or ()))
        for size in [None] if sizes is None else sizes:
            batch = batch if size is None else batch_blocks.repeated(batch, size)
            one = BlockStager([batch], self.block, size).take(1)
            block = self._placed(one._replace(steps=0))
            active = active_here(self.setup, range(0), block.capacity)
            given = Steps(block, self.region_keys, active, [], False)
            state = loop.inner_steps(state, given).state
        return state

    def _room(self, limit: batch_blocks.DispatchLimit) -> int:
        """Steps of the next block; the leader decides, since all processes must call alike."""
        if jax.process_count() == 1:
            return limit.room(self.block)
        return leader().broadcast_from_leader("room", lambda: limit.room(self.block))

    def _placed(self, block: BatchBlock) -> BatchBlock:
        return block._replace(batches=self.place(block.batches, cut=block.stride is not None))

    def finish(self, state: TrainState, participants: AtTheEnd = None) -> TrainState:
        """Land what is in flight, then synchronise once more, blocking (`sync.finish.finish`).

        Args:
          state: is donated; use the returned one.
          participants: fragment -> bool `[R]`: who takes part in its last synchronisation; None =
            everyone.

        Returns:
          The state, in which each region's trained leaves equal its anchor (without an anchor: the
          mean of the regions). The events are booked on the clock and not returned.

        Raises:
          ValueError: the state was donated before.
          exchange.Parted: separate jobs end with different anchors.
        """
        state, events = self._begin(state).finish(state, participants)
        if self.clock is not None:
            follow(self.clock, int(state.counters.step), events)
        return state

    def reconnect(self, state: TrainState) -> None:
        """Start the exchanges of the payloads that a restored state has in flight.

        For a job that is one region of several; on one mesh the payloads are in the state, and
        nothing happens.

        Args:
          state: as `checkpoint` restored it.

        Raises:
          ValueError: the checkpoint lacks the codec's state from before a send.
        """
        loop = self.sync_loop(state)
        loop.carrier.reconnect(loop, state)

    # -- helpers ------------------------------------------------------------------------------

    def own_batch(self, batch: int, cut: bool = False) -> tuple[range, range]:
        """The part of every batch that this process loads, for an engine with `batches="own"`.

        Args:
          batch: samples a region and step.
          cut: whether the batch is cut into microbatches (`microbatch=`, or an `AdaptiveEngine`);
            a process then loads all samples of its regions.

        Returns:
          (numbers of its regions, numbers of the samples in each of them): the leaves that this
          process hands over are `[len(regions), len(samples), ...]`.
        """
        part = self._part(cut)
        regions = part.range(0, self.regions.count)
        return regions, range(batch) if cut else part.range(2, batch)

    @property
    def _rows(self) -> int:
        """Regions in the batches that this process is given."""
        return len(self.own_batch(1, True)[0]) if self._given_parts else self.regions.count

    def _part(self, cut: bool) -> Part:
        mesh = self.regions.mesh
        part = part_here(self._batch_sharding, (mesh.shape[REGION], 1, mesh.shape["fsdp"]))
        if not cut:
            return part
        return Part((part.first[0], 0, 0), (part.length[0], 1, 1), (part.of[0], 1, 1))

    def place(self, batches: PyTree, cut: bool = False) -> PyTree:
        """Put staged batches on the mesh, cut by region and sample.

        Args:
          batches: host leaves `[R, S, b, ...]`, S steps of b samples.
          cut: see `own_batch`.

        Returns:
          The same leaves as device arrays; on a mesh of one device unchanged, since the call that
          takes them transfers them faster.

        Raises:
          ValueError: a wrong number of regions, or a batch that does not divide over the devices.
        """
        shape = jax.tree.leaves(batches)[0].shape
        count, devices = self.regions.count, self.regions.mesh.shape["fsdp"]
        if not self._given_parts:
            check_batch(shape, count, devices, self.setup.accumulate)
            if self.regions.mesh.size == 1:
                return batches  # the call itself transfers them, and faster
            return place(batches, self._batch_sharding)
        part = self._part(cut)
        count, devices = len(part.range(0, count)), len(part.range(2, devices))
        check_batch(shape, count, devices, self.setup.accumulate)
        return place_parts(batches, self._batch_sharding, part)


def _unopened(exchange: Any) -> Refused:
    """Why an engine of several jobs cannot train."""
    return Refused(TITLE, [f"exchange={exchange!r}: no open exchange; give exchange.store(...)"])


def _of_one_step(x: Any) -> Any:
    """A batch's leaf, with a step axis: host arrays are copied, the caller may write to them."""
    return np.array(x)[:, None] if isinstance(x, np.ndarray) else x[:, None]


def mask_here(participants: Participants, step: int, total: int, here_R: np.ndarray) -> np.ndarray:
    """Bool `[R]`: who takes part, of the regions in this job (`Engine.here`); None = all.

    Raises:
      ValueError: `participants` does not give one bool for each of all `total` regions.
    """
    if participants is None or (found := participants(step)) is None:
        return np.ones(len(here_R), bool)
    mask = np.asarray(found, bool)
    if mask.shape != (total,):
        raise ValueError(f"participants has shape {mask.shape}: give one bool per region ({total})")
    return mask[here_R]


def active_here(setup: Setup, steps: range, capacity: int) -> np.ndarray | None:
    """Bool `[R, S]`: which regions make an inner step; None = all of them, always."""
    pace = setup.method.schedule.pace
    if pace is None or setup.separate:
        return None  # a job that is one region makes all of its own steps
    active = np.zeros((setup.regions, capacity), bool)
    for i, t in enumerate(steps):
        active[:, i] = pace.active(t, setup.regions)
    return active


def book(
    clock: VirtualClock, steps: range, events: list[Event], presence: dict[str, np.ndarray]
) -> None:
    """Advance the virtual clock by these steps and their events.

    Args:
      presence: `[R, S]` by name, as in `network.drive`: bool `active` or `away`, float `work`;
        empty where every region makes each step, and all steps are alike.
    """
    for i, t in enumerate(steps):
        masks = {name: mask[:, i] for name, mask in presence.items()}
        drive(clock, t, [e for e in events if e.step == t], **masks)
