"""Every program of an engine, compiled on shapes alone, for devices that need not exist.

The engine's own loop passes the arguments (`put_in_flight`, `move`, `adopt`), so that the programs
compiled here are those that a run calls.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lowcomm_jax.engine import Engine, active_here
from lowcomm_jax.history import Event
from lowcomm_jax.loops.channel_loop import ChannelLoop
from lowcomm_jax.loops.gradient_exchange import GradientLoop
from lowcomm_jax.loops.two_level_loop import TwoLevelLoop
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.params.layout import make_layout
from lowcomm_jax.schedule.base import Move
from lowcomm_jax.state.train_state import TrainState
from lowcomm_jax.sync.initial_state import abstract_state, region_batch
from lowcomm_jax.sync.round_programs import RoundPrograms, each
from lowcomm_jax.sync.sync_loop import Steps, SyncLoop
from lowcomm_jax.train.batch_blocks import BatchBlock
from lowcomm_jax.train.inner_step import keys_of_regions

PyTree = Any
Progress = Callable[[str, int, int], None]
Record = Callable[..., Callable]
USUAL_PROGRAMS = 4  # of a method with an anchor: inner step, send, anchor update, landing
LABELS = {
    "inner_program": "inner step",
    "concurrent": "inner steps and exchange",
    "gradient_program": "inner step and exchange",
    "channel_program": "inner steps and channels",
    "payload_program": "send",
    "outer_program": "anchor update",
    "landing_program": "landing",
    "received_program": "received anchor",
    "average_program": "average of buffers",
    "drift_program": "drift of fragments",
    "header_program": "mean of headers",
    "token_rate_program": "rates of tokens",
    "recount_program": "count of tokens",
    "copy_program": "copy of a measurement",
    "arrive": "arrival at a server",
    "leave": "update of a server",
    "reach": "anchor update",
    "merge": "mix of the anchor into a server",
}
"""What a period calls, by the names of `round_programs.each`."""
HOST_ARGUMENTS = {
    "payload_program": (1, 2),
    "outer_program": (0,),
    "landing_program": (1,),
}


class TooLargeError(RuntimeError):
    """A program that its compiler refuses, since it cannot fit into the device's memory (TPUs)."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """One program of an engine, for one target.

    Attributes:
      name: such as `inner step` or `send of fragment 0`.
      compiled: JAX's compiled program.
      brought: bytes a device of arguments that do not lie there between programs (`offload`).
      seconds: that compiling took.
    """

    name: str
    compiled: jax.stages.Compiled
    brought: int
    seconds: float

    @property
    def memory(self) -> dict[str, int]:
        """Bytes a device: `arguments`, `outputs`, `temporaries`, `aliased` (outputs in the place of
        arguments)."""
        found = self.compiled.memory_analysis()
        return {
            "arguments": found.argument_size_in_bytes,
            "outputs": found.output_size_in_bytes,
            "temporaries": found.temp_size_in_bytes,
            "aliased": found.alias_size_in_bytes,
        }

    def needs(self, resident: int) -> int:
        """Bytes a device while it runs, beside a state of `resident` bytes."""
        memory = self.memory
        own = memory["temporaries"] + memory["outputs"] - memory["aliased"]
        return resident + self.brought + own


@dataclasses.dataclass(frozen=True)
class CompiledEngine:
    """All programs of an engine, and its state.

    Attributes:
      programs: in the order in which a period calls them.
      resident: bytes a device of the state that lies there between programs, payload in flight
        included.
      stowed: bytes a device that `offload` keeps in the host's memory.
      announced: bytes that the ledger books for a region's send of the largest fragment, or of all
        channels at once.
    """

    programs: tuple[CompiledProgram, ...]
    resident: int
    stowed: int
    announced: int


def compile_engine(
    engine: Engine,
    params: PyTree,
    batch: PyTree,
    progress: Progress | None = None,
    inner_alone: bool = False,
) -> CompiledEngine:
    """Compile the programs of a period: inner step, and the largest fragment's send and landing.

    Args:
      engine: on the mesh of a target, or of this machine's devices; its loss function is traced,
        nothing runs.
      params: shapes of the parameters, the user's tree.
      batch: shapes of one region's batch of a step, `[b, ...]`.
      progress: see `ahead_of_time`.
      inner_alone: leave out sends and landings; the state then has no payload in flight.

    Raises:
      TooLargeError: a TPU's compiler refuses a program that is too large. (A GPU's compiles it; the
        report then says that it does not fit.)
    """
    found: list[CompiledProgram] = []
    record = _recorder(engine, found, progress)
    state, announced = call_programs(engine, params, batch, record, inner_alone)
    stowed = 0
    if engine.setup.offload:
        snapshots = [flight.snapshot for flight in state.in_flight.values()]
        stowed = device_bytes((state.anchor, state.outer, state.codec, state.received, snapshots))
    return CompiledEngine(tuple(found), device_bytes(state) - stowed, stowed, announced)


def call_programs(
    engine: Engine, params: PyTree, batch: PyTree, record: Record, inner_alone: bool = False
) -> tuple[TrainState, int]:
    """Call every program of a period on shapes, as the engine's own loop does.

    Args: as for `compile_engine`, and
      record: (program, its name, positions of arguments that lie on the host) -> what is called in
        its place; gives the shapes of the program's results.

    Returns:
      (shapes of the state with a payload in flight, `CompiledEngine.announced`).
    """
    layout = make_layout(params, engine.setup.roles)
    programs = engine.programs_for(layout, offload=False)
    state = abstract_state(programs, params)
    recording = _recording(programs, record, engine.setup.offload)
    loop = engine.loop_of(recording)
    staged = region_batch(programs, batch)
    lies = programs.regions.sharding(REGION)
    words = keys_of_regions(engine.setup.seed, engine.setup.here)
    keys = jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=lies)
    everyone = np.ones(loop.count, bool)
    active = active_here(engine.setup, range(1, 2), 1)
    given = Steps(BatchBlock(staged, 1, 1), keys, active, [], False)
    if loop.every_step:
        given = given._replace(masks=[everyone])
    ran = loop.inner_steps(state, given)
    if isinstance(loop, GradientLoop):
        return state, int(loop.traffic(everyone).sent.max())
    state = ran.state
    if isinstance(loop, ChannelLoop) and loop.main is None:
        return state, loop.announced()
    if not inner_alone and isinstance(loop, TwoLevelLoop):
        state = _record_servers(loop, state)
    elif not inner_alone:
        acts = loop.main if isinstance(loop, ChannelLoop) else loop
        state = _record_round(acts, state, _largest(acts), given)
    return state, int(state.counters.bytes_sent.max())


def _largest(loop: SyncLoop) -> int:
    return max(range(len(loop.fragments)), key=loop.fragments.numel)


def _record_round(loop: SyncLoop, state: TrainState, p: int, given: Steps) -> TrainState:
    """Send, anchor update and landing of fragment p; returns the state with the payload in it.

    Args:
      given: the steps beside which the payload is exchanged.
    """
    everyone = np.ones(loop.count, bool)
    step = loop.schedule.next_send(0, state.counters)
    loop.by_tokens = False  # the same shapes, and no token counts to read
    sent = loop.put_in_flight(state, p, step, everyone, None, [], "payload")
    # Weights and masks are a few bytes, which the host reads: here they have values.
    flight = dataclasses.replace(
        sent.in_flight["payload"],
        weight=np.ones(loop.count, np.float32),
        accepted=everyone,
    )
    ready = sent.replace(in_flight={"payload": flight})
    if loop.programs.concurrent is not None:
        ready = sent = loop.inner_steps(ready, given).state
    if "drift" not in flight.header:
        loop.measurements = None  # they read values
    # As a boundary's: of rules that take a region's own parts, both are there.
    moved, _ = loop.move(ready, Move("payload", "payload"), True)
    loop.adopt(moved, p, moved.in_flight["payload"], everyone, step)
    if loop.method.topology is not None:
        loop.send_ahead(sent, p, [Event.of_landing(step, p, "payload", everyone, 0, {})])
    return sent


def _record_servers(loop: TwoLevelLoop, state: TrainState) -> TrainState:
    """Every worker's arrival, and its server's exchange with the global one; returns the state.

    The ledger books all workers' arrivals; the programs are the same for all.
    """
    state = loop._deliver(state, 0, 1, [])
    for region in range(1, loop.count):
        host = loop._host(loop.schedule.group_of(region))
        loop._moved(state, f"0@1/{region}", region, host, [], loop._delta, loop._dense)
    group, programs = np.int32(0), loop.servers
    servers = programs.leave(state.servers, group)
    anchor, outer, servers = programs.reach(state.anchor, state.outer[0], servers, group)
    return state.replace(anchor=anchor, outer=(outer,), servers=programs.merge(servers, group))


def _recorder(engine: Engine, found: list, progress: Progress | None) -> Record:
    """Makes of a program one that compiles when it is called, and returns shapes."""

    def recording(program: Any, name: str, host: tuple[int, ...] = ()) -> Callable:
        def call(*args, **kwargs):
            if progress is not None:
                usual = USUAL_PROGRAMS if engine.method.has_anchor else 1
                progress(name, len(found), max(usual, len(found) + 1))
            start = time.perf_counter()
            lowered = program.lower(*args, **kwargs)
            try:
                compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                why = str(error).splitlines()[0].partition("RESOURCE_EXHAUSTED: ")[2]
                raise TooLargeError(f"{name}: {why}") from error
            seconds = time.perf_counter() - start
            brought = sum(device_bytes(args[i]) for i in host if i < len(args))
            found.append(CompiledProgram(name, compiled, brought, seconds))
            return jax.tree.map(_placed, lowered.out_info, compiled.output_shardings)

        return call

    return recording


def _recording(programs: RoundPrograms, record: Record, offload: bool) -> RoundPrograms:
    """The programs, each of which is recorded when it is called (`_recorder`)."""

    def recorded(program: Any, field: str) -> Callable:
        host = HOST_ARGUMENTS.get(field, ()) if offload else ()
        return record(program, LABELS[field], host) if field in LABELS else program

    return each(programs, recorded)


def _placed(like: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


def device_bytes(tree: PyTree) -> int:
    """Bytes of one device's part of shapes with shardings; NumPy values lie on the host."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]
    return sum(math.prod(_part(x)) * x.dtype.itemsize for x in leaves)


def _part(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
