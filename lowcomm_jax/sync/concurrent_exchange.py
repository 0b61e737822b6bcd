"""Inner steps and the exchange of payloads in flight as one program, so that they run at one time.

A collective cannot span programs: it ends in the program that starts it. So the collectives of a
payload in flight run in the program of the inner steps that follow its send. The first collective
starts before the loop over the steps, and a barrier holds its raw buffers until after the loop.
Unpacking, decoding and the mean stay in the landing's program. A reduction of two collectives cuts
the loop in two.

Numbers equal those of a landing that does the collectives itself: the same values move, and sums
stand between the same collectives.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.sync.compiler_options import inner_options
from lowcomm_jax.train.inner_step import InnerStep, inner_block

PyTree = Any


class Kind(NamedTuple):
    """The shapes that a payload's exchange is compiled for; equal for fragments of equal leaves.

    Attributes:
      leaves: (name, shape) of the fragment's leaves of one region.
      level: of the codec.
    """

    leaves: tuple[tuple[str, tuple[int, ...]], ...]
    level: int

    @property
    def like(self) -> PyTree:
        return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in self.leaves}


class ConcurrentExchange:
    """Compiles and calls inner steps together with the exchange of payloads.

    Attributes:
      exchange: reduces payloads at the landing.
    """

    def __init__(
        self,
        step: InnerStep,
        regions: Regions,
        exchange: MeshExchange,
        out_shardings: PyTree,
    ):
        self.exchange = exchange
        self._block = inner_block(step, regions)
        self._out = out_shardings
        self._regions = regions
        self.program = functools.lru_cache(maxsize=None)(self._program)

    def _program(self, kinds: tuple[Kind, ...]) -> Callable:
        """The jitted program for payloads of these kinds, each a buffer in flight."""
        options = inner_options(self._regions, len(kinds))

        def program(inner, frozen, batches, region_keys, active, n, payloads, weights):
            return self._traced(
                kinds, (inner, frozen, batches, region_keys, active), n, payloads, weights
            )

        return jax.jit(
            program, donate_argnums=0, out_shardings=(self._out, None), compiler_options=options
        )

    def each(self, make: Callable[[Callable, str], Callable]) -> ConcurrentExchange:
        """As `round_programs.each`."""
        other = copy.copy(self)
        other.program = lambda kinds: make(self.program(kinds), "concurrent")
        return other

    def __call__(self, given: Sequence[Any], n, flights: Sequence[tuple[Kind, PyTree, jax.Array]]):
        """The first n steps of a block, and the collectives of the payloads in flight.

        Args:
          given: the arguments of `RoundPrograms.inner_program` before n.
          flights: (kind, payload `[R, ...]`, weight float32 `[R]`) of each payload.

        Returns:
          ((inner, metrics), result of each payload's collectives, `brought` of
          `MeshExchange.reduce`).
        """
        kinds, payloads, weights = zip(*flights)
        program = self.program(tuple(kinds))
        return program(*given, n, tuple(payloads), tuple(weights))

    @staticmethod
    def kind(like: PyTree, level: int) -> Kind:
        """The kind of a fragment with leaves of these shapes."""
        return Kind(tuple((name, leaf.shape) for name, leaf in sorted(like.items())), level)

    def _traced(self, kinds, given, n, payloads, weights):
        inner, *rest = given
        flights = list(zip(map(self._reduction, kinds), payloads, weights))
        brought = [begin(payload) for (begin, _), payload, _ in flights]
        carry = inner, self._block.empty(*given)
        two = self.exchange.collectives == 2
        half = (n + 1) // 2 if two else n
        carry = self._block.steps(carry, *rest, None, half)
        brought, carry = _together(brought, carry)
        if two:
            brought = [
                go_on(buffers, payload, weight)
                for ((_, go_on), payload, weight), buffers in zip(flights, brought)
            ]
            carry = self._block.steps(carry, *rest, half, n)
            brought, carry = _together(brought, carry)
        return carry, brought

    def _reduction(self, kind: Kind) -> tuple[Callable, Callable]:
        """(`MeshExchange.begin`, `go_on`) for payloads of this kind."""
        exchange, like = self.exchange.at(kind.level), kind.like

        def begin(payload):
            return exchange.begin(payload, like)

        def go_on(buffers, payload, weight):
            return exchange.go_on(buffers, payload, weight, like)

        return begin, go_on


def _together(brought, carry):
    """Hold the raw buffers until the loop has ended: none of it is read before."""
    inner, log = carry
    brought, params = jax.lax.optimization_barrier((brought, inner.params))
    return brought, (dataclasses.replace(inner, params=params), log)
