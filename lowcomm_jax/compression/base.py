"""The contract of a codec: a tree of fp32 arrays in, a payload of the true wire size out."""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.means import as_rounded, weighted_mean
from lowcomm_jax.compression.placement import Placement
from lowcomm_jax.refused import Refused

PyTree = Any


class Codec(abc.ABC):
    """Encoding and decoding of one region, as pure functions; subclasses are frozen dataclasses.

    Every function is jit-able and vmap-able with static shapes; the arithmetic is fp32. `like` is
    a pytree of arrays or `jax.ShapeDtypeStruct`.

    Attributes:
      personal: whether each region changes the mean by its own state (`receive`), so that each
        needs an anchor of its own.
      increments: whether payloads decode to changes of values that receivers hold (`ef21`); the
        outer rule must then sum them up.
      keeps_residual: whether what was not sent is added to the next values (`error_feedback`).
    """

    personal: bool = False
    increments: bool = False
    keeps_residual: bool = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Short label for tables."""

    @abc.abstractmethod
    def init(self, like: PyTree) -> PyTree:
        """State at step 0: a pytree of arrays, `()` when the codec has none."""

    @abc.abstractmethod
    def encode(self, tree: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        """Turn float leaves into (payload, new state); the payload's buffers travel as they are.

        params: leaves like those of `tree`, for a codec that `reads_params`.
        """

    def encode_if(
        self, accepted: jax.Array | None, tree: PyTree, state: PyTree, params: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """`encode`, but where `accepted` (bool scalar) is False the state stays as it was."""
        payload, new = self.encode(tree, state, *(() if params is None else (params,)))
        return payload, _where(accepted, new, state)

    def encode_with_residual(
        self,
        tree: PyTree,
        state: PyTree,
        residual: PyTree,
        decay: float,
        accepted: jax.Array | None,
        params: PyTree = None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """(payload, state, residual) after an encoding with error feedback (`ErrorFeedback`).

        Args:
          residual: fp32 leaves like those of `tree`; decay: its factor.
          accepted: as in `encode_if`, for state and residual; None = True.
        """
        # Values that a product made are rounded before anything is added to them.
        values = as_rounded(jax.tree.map(lambda x: x.astype(jnp.float32), tree))
        kept = as_rounded(jax.tree.map(lambda e: decay * e, residual))
        total = as_rounded(jax.tree.map(jnp.add, values, kept))
        payload, new_state = self.encode_if(accepted, total, state, params)
        # What is subtracted must be the very bits that receivers decode.
        received = as_rounded(self.decode(payload, tree))
        missed = jax.tree.map(jnp.subtract, total, received)
        return payload, new_state, _where(accepted, missed, residual)

    @abc.abstractmethod
    def decode(self, payload: PyTree, like: PyTree) -> PyTree:
        """The values that every receiver decodes: fp32 leaves in the shapes of `like`."""

    @abc.abstractmethod
    def nbytes(self, like: PyTree) -> int:
        """Bytes of one payload, known before encoding."""

    def aggregate(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        """Weighted fp32 mean of the decoded payloads.

        Args:
          payload_R: payloads with a leading region axis.
          weight_R: float32 `[R]`, not negative, not normalised; 0 = absent, and the payload then
            has no effect, even if it is not finite.
          like: shapes of one region's tree.

        Returns:
          fp32 leaves in the shapes of `like`; 0 when all weights are 0.
        """
        return weighted_mean(lambda payload: self.decode(payload, like), payload_R, weight_R)

    # -- where a region's devices hold parts of the leaves -----------------------------------------

    @property
    def local(self) -> bool:
        """Whether functions of arrays take a device's parts, of the codec that `placed` returns.

        They are then called within a `shard_map` over all axes of the mesh. Else they are given
        whole leaves, and the compiler places the communication.
        """
        return False

    @property
    def reads_params(self) -> bool:
        """Whether `encode` is given the weights that the values would change."""
        return False

    @property
    def places(self) -> Mapping[str, Placement]:
        """How each leaf is placed, by path; of a codec that `placed` returned."""
        return {}

    def placed(
        self, like: PyTree, specs: Mapping[str, P], sizes: Mapping[str, int], staged: bool
    ) -> Codec:
        """The codec for leaves of these shapes, cut as `specs` say over axes of these `sizes`.

        staged: whether pipeline stages code their own parts. Arrays of payloads and of states that
        have no leaf's shape then carry the stages in front.
        """
        del like, specs, sizes, staged
        return self

    def payload_specs(self, like: PyTree, payload: PyTree = None) -> PyTree:
        """How devices hold a payload; of a codec that is not `local`: all of it.

        payload: its shapes, where `undeal` gave arrays of a matrix more entries than `encode` does.
        """
        del payload

        def encode(x):
            return self.encode(x, self.init(like), *((x,) if self.reads_params else ()))[0]

        shapes = jax.eval_shape(encode, like)
        return jax.tree.map(lambda _: P(), shapes)

    # -- slices of a payload, for a two-shot reduction ---------------------------------------------

    def requantizable(self, like: PyTree) -> bool:
        """Whether a mean may be encoded again, so that a two-shot reduction makes sense.

        A codec that says so has `in_slices`, and what that returns the four functions that follow.
        """
        del like
        return False

    def in_slices(self, slices: int) -> Codec:
        """The codec of payloads that are cut into so many slices, one for each region."""
        raise self._without("in_slices")

    def dealt_nbytes(self, like: PyTree) -> int:
        """Bytes of all slices of a payload."""
        raise self._without("dealt_nbytes")

    def deal(self, payload: PyTree, like: PyTree) -> PyTree:
        """A payload in equal slices, leaves `[R, ...]`; slice r is what region r reduces."""
        raise self._without("deal")

    def undeal(self, slices: PyTree, like: PyTree) -> PyTree:
        """The payload of the mean, from all its slices, each coded by `recode`."""
        raise self._without("undeal")

    def recode(
        self, slice_R: PyTree, weight_R: jax.Array, number: jax.Array, like: PyTree
    ) -> PyTree:
        """The coded weighted mean of slice `number` of everyone's payload, leaves `[R, ...]`."""
        raise self._without("recode")

    def _without(self, function: str) -> Refused:
        fix = "write it, or leave requantizable out"
        return Refused("codec", [f"{self.name} is requantizable and has no {function}: {fix}"])

    def at(self, level: int) -> Codec:
        """The codec at one of its levels (`CodecLevels`); a plain codec has level 0 alone."""
        if level:
            raise ValueError(f"{self.name} has one level: level {level} needs `CodecLevels`")
        return self

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, like: PyTree, energy: float
    ) -> jax.Array | None:
        """Rank that holds `energy` of the mean's squared norm, from low-rank factors alone.

        Args:
          payload_R, weight_R, like: as in `aggregate`.
          energy: share of the squared norm, in (0, 1].

        Returns:
          float32 scalar, the mean over tensors weighted by their elements; 0 when all weights are
          0; None when no tensor travels as factors.
        """
        del payload_R, weight_R, like, energy
        return None

    def receive(self, mean: PyTree, state: PyTree, sent: jax.Array) -> tuple[PyTree, PyTree]:
        """(values for one region's outer rule, its new state), made of the mean; see `personal`.

        Args:
          mean: result of `aggregate`.
          state: of this region, after `encode`.
          sent: bool scalar, whether this region's payload is in the mean.
        """
        del sent
        return mean, state


def memory_problem(codec: Codec) -> str | None:
    """Why a codec can have no residual, copy or momentum around it; None = it can.

    What codes leaves is no `Codec`. A residual of increments grows without bound, a mean that is
    personal (`receive`) is lost, and what two residuals keep is added twice.
    """
    if not isinstance(codec, Codec):
        return f"codec={codec!r} codes leaves, not trees: put compression.PerTensor around it"
    if not (codec.increments or codec.personal or codec.keeps_residual):
        return None
    return f"codec {codec.name} keeps what it has not sent itself: use it as it is"


@dataclasses.dataclass(frozen=True)
class Wrapper(Codec):
    """A codec around another that changes the values before they are encoded, not the payload.

    A subclass has a `name`, `init` and `encode`. Where it says that it is `requantizable`, payloads
    of the wrapped codec may be cut into slices, whose mean is encoded a second time without the
    wrapper; else every region gets all payloads (all-gather).

    Attributes:
      codec: decodes, averages and counts the payloads.
      elementwise: whether it treats every value by itself, so that it may be given a device's parts
        of the leaves. Else it is given whole leaves, and the compiler places the communication.
    """

    codec: Codec
    elementwise: ClassVar[bool] = False

    @property
    def increments(self) -> bool:
        return self.codec.increments

    @property
    def keeps_residual(self) -> bool:
        return self.codec.keeps_residual

    def decode(self, payload: PyTree, like: PyTree) -> PyTree:
        return self.codec.decode(payload, like)

    def aggregate(self, payload_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
        return self.codec.aggregate(payload_R, weight_R, like)

    def nbytes(self, like: PyTree) -> int:
        return self.codec.nbytes(like)

    @property
    def local(self) -> bool:
        return self.elementwise and self.codec.local

    def at(self, level: int) -> Codec:
        inner = self.codec.at(level)
        return self if inner is self.codec else self._around(inner)

    def _around(self, codec: Codec) -> Wrapper:
        """This wrapper around another form of its codec."""
        changed = copy.copy(self)
        # Past the checks of settings, which are the same.
        object.__setattr__(changed, "codec", codec)
        return changed

    @property
    def reads_params(self) -> bool:
        return self.codec.reads_params

    @property
    def places(self) -> Mapping[str, Placement]:
        return self.codec.places

    def placed(
        self, like: PyTree, specs: Mapping[str, P], sizes: Mapping[str, int], staged: bool
    ) -> Codec:
        if not self.local:
            return self
        return self._around(self.codec.placed(like, specs, sizes, staged))

    def payload_specs(self, like: PyTree, payload: PyTree = None) -> PyTree:
        return self.codec.payload_specs(like, payload)

    def in_slices(self, slices: int) -> Codec:
        return self._around(self.codec.in_slices(slices))

    def dealt_nbytes(self, like: PyTree) -> int:
        return self.codec.dealt_nbytes(like)

    def deal(self, payload: PyTree, like: PyTree) -> PyTree:
        return self.codec.deal(payload, like)

    def undeal(self, slices: PyTree, like: PyTree) -> PyTree:
        return self.codec.undeal(slices, like)

    def recode(
        self, slice_R: PyTree, weight_R: jax.Array, number: jax.Array, like: PyTree
    ) -> PyTree:
        return self.codec.recode(slice_R, weight_R, number, like)

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, like: PyTree, energy: float
    ) -> jax.Array | None:
        return self.codec.mean_rank(payload_R, weight_R, like, energy)


def _where(accepted: jax.Array | None, new: PyTree, old: PyTree) -> PyTree:
    return (
        new if accepted is None else jax.tree.map(lambda n, o: jnp.where(accepted, n, o), new, old)
    )
