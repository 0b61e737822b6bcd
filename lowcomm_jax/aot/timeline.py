"""When one device computes and when it waits: a scheduled program, played without the device.

Kernels run one after another in the program's order, at the shares of the peaks that `kernels`
names. Beside them one link moves collectives, one after another in the order of their starts. The
device waits at the end of a collective that has not arrived. One that has no end of its own is
waited for at once.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from lowcomm_jax.aot.collectives import KINDS as COLLECTIVES
from lowcomm_jax.aot.hlo import Instruction, Program
from lowcomm_jax.aot.kernels import KINDS, OTHER, OTHERS_REACH, PRODUCTS_REACH, kernel_of
from lowcomm_jax.aot.targets import Accelerator

Place = tuple[str, str]  # a computation, and an instruction in it


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """What all kernels of a kind do in a program.

    Attributes:
      flops: of their products.
      nbytes: that they read and write.
      launches: how many there are.
      seconds: that they take.
    """

    flops: float
    nbytes: int
    launches: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class PlayedProgram:
    """A program, played.

    Attributes:
      work: by kind of kernel (`kernels.KINDS`).
      waited: seconds that the device waits for a collective, all its runs together.
      beside: seconds of kernels between the start of a collective and its end, all runs together.
    """

    work: dict[str, KernelWork]
    waited: Mapping[Place, float]
    beside: Mapping[Place, float]


def play(
    program: Program, transfers: Mapping[Place, float | None], accelerator: Accelerator
) -> PlayedProgram:
    """Play a program on one device.

    Args:
      transfers: seconds on the link of one run of each collective. None = it moves over another
        network, and nothing waits for it. Those left out move nothing.

    A loop whose number of trips is a traced value counts one; of a conditional the branch counts
    that moves most.
    """
    player = _Player(program, transfers, accelerator)
    player.run(program.entry)
    sums = player.sums
    work = {
        kind: KernelWork(
            sums["flops", kind],
            round(sums["nbytes", kind]),
            round(sums["launches", kind]),
            sums["seconds", kind],
        )
        for kind in KINDS
    }
    waited, beside = ({at: sums[what, at] for at in transfers} for what in ("waited", "beside"))
    return PlayedProgram(work, waited, beside)


_NOW, _BUSY = "now", "busy"  # seconds that have passed, and those of them with a kernel running
_STEADY = 1e-6  # relative difference below which two trips of a loop are the same


class _Player:
    def __init__(self, program, transfers, accelerator):
        self.program, self.transfers = program, transfers
        self.product_rate = PRODUCTS_REACH * accelerator.flops
        self.memory_rate = OTHERS_REACH * accelerator.memory_rate
        self.sums: collections.Counter = collections.Counter()
        self.free_at = 0.0  # when the link has moved all that has started
        self.costs: dict[Place, dict] = {}

    def run(self, name: str) -> None:
        """Play a computation."""
        order = self.program.computations[name]
        starts = {
            end: start
            for end, start in starts_by_end(order).items()
            if (name, start) in self.transfers
        }
        pending = dict.fromkeys(starts.values())
        for one in order:
            place = name, one.name
            if one.name in starts:
                self._end((name, starts[one.name]), *pending[starts[one.name]])
            elif one.name in pending:
                pending[one.name] = self._start(place)
            elif one.opcode == "while":
                self._loop(one)
            elif one.branches:
                self.run(self.program.branch(one))
            elif one.opcode in ("call", "async-start"):
                for called in one.called.values():
                    self.run(called)
            else:
                for at in self._waited_for(one, place):
                    self._end(at, *self._start(at))
                self._launch(one, place)

    def _waited_for(self, one: Instruction, place: Place) -> Iterator[Place]:
        """An instruction's collective without an end of its own, or those of a fusion."""
        inside = one.called.get("calls", "")
        places = [place, *((inside, x.name) for x in self.program.computations.get(inside, ()))]
        return (at for at in places if at in self.transfers)

    def _start(self, place: Place) -> tuple[float, float]:
        """(when it arrives, seconds of kernels until now)."""
        seconds = self.transfers[place]
        if seconds is None:
            return 0.0, self.sums[_BUSY]
        self.free_at = max(self.free_at, self.sums[_NOW]) + seconds
        return self.free_at, self.sums[_BUSY]

    def _end(self, place: Place, arrives: float, busy: float) -> None:
        wait = max(0.0, arrives - self.sums[_NOW])
        self.sums[_NOW] += wait
        self.sums["waited", place] += wait
        self.sums["beside", place] += self.sums[_BUSY] - busy

    def _launch(self, one: Instruction, place: Place) -> None:
        if place not in self.costs:
            self.costs[place] = self._cost(one, place[0])
        self.sums.update(self.costs[place])

    def _cost(self, one: Instruction, computation: str) -> dict:
        """What a launch adds to the sums."""
        kernel = None if one.base in COLLECTIVES else kernel_of(self.program, one, computation)
        if kernel is None:
            return {}
        seconds = kernel.flops / self.product_rate
        if kernel.kind == OTHER:  # a copy moves beside kernels
            seconds = 0.0 if kernel.is_copy else kernel.nbytes / self.memory_rate
        amounts = {"flops": kernel.flops, "nbytes": kernel.nbytes, "launches": 1}
        mine = {(what, kernel.kind): amount for what, amount in amounts.items()}
        return {**mine, ("seconds", kernel.kind): seconds, _NOW: seconds, _BUSY: seconds}

    def _loop(self, loop: Instruction) -> None:
        """Play trips until one is like the one before; the others are that one again."""
        trips, before = self.program.trips(loop) or 1, None
        while trips:
            sums, backlog = self.sums.copy(), self.free_at - self.sums[_NOW]
            self.run(loop.called["condition"])
            self.run(loop.called["body"])
            trips -= 1
            change = {key: total - sums[key] for key, total in self.sums.items()}
            change["backlog"] = max(0.0, self.free_at - self.sums[_NOW]) - max(0.0, backlog)
            if before is not None and _alike(change, before):
                del change["backlog"]
                self.sums.update({key: trips * amount for key, amount in change.items()})
                self.free_at += trips * change[_NOW]
                return
            before = change


def _alike(one: Mapping, other: Mapping) -> bool:
    largest = max(one[_NOW], 1e-12)
    return one.keys() == other.keys() and all(
        math.isclose(one[key], other[key], rel_tol=_STEADY, abs_tol=_STEADY * largest)
        for key in one
    )


def starts_by_end(order: Sequence[Instruction]) -> dict[str, str]:
    """Name of the instruction that ends a collective's transfer -> of the one that starts it.

    Between slices of TPUs a `send` starts it, and the `recv-done` of the same rendezvous ends it.
    """
    named = {one.name: one for one in order}
    meeting = r'rendezvous="([^"]*)"'
    sends = {one.attribute(meeting): one.name for one in order if one.opcode == "send"}
    found = {}
    for one in order:
        start = named.get(one.operands[0]) if one.opcode.endswith("-done") else None
        if start is None or '"is_sync":true' in start.attributes:
            continue
        if start.opcode == "recv":
            begun = sends.get(start.attribute(meeting))
            if begun is not None:
                found[one.name] = begun
        elif start.base in COLLECTIVES and start.base != "send":
            found[one.name] = start.name
    return found
