"""The contract of a codec: a tree of fp32 arrays in, a payload of the true wire size out."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lowcomm_jax.compression.row_sharding import RowCut

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
    def encode(self, tree: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Turn float leaves into (payload, new state); the payload's buffers travel as they are."""

    def encode_if(self, accepted: jax.Array, tree: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """`encode`, but where `accepted` (bool scalar) is False the state stays as it was."""
        payload, new = self.encode(tree, state)
        return payload, _where(accepted, new, state)

    def encode_with_residual(
        self,
        tree: PyTree,
        state: PyTree,
        residual: PyTree,
        decay: float,
        accepted: jax.Array | None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """(payload, state, residual) after an encoding with error feedback (`ErrorFeedback`).

        Args:
          residual: fp32 leaves like those of `tree`; decay: its factor.
          accepted: as in `encode_if`, for state and residual; None = True.
        """

        def decode(payload):
            return self.decode(payload, tree)

        return encode_with_residual(self.encode, decode, tree, state, residual, decay, accepted)

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

    def rows_together(self, path: str, shape: tuple[int, ...]) -> int:
        """How many rows of a leaf are coded together; a device should hold a multiple of them.

        0 = every value by itself, so that columns may be cut as well.
        """
        del path, shape
        return 1

    def splits_over(self, path: str, shape: tuple[int, ...], devices: int) -> bool:
        """Whether the devices a leaf is cut over can split it into whole units (`windows`)."""
        del path, shape, devices
        return False

    def with_layout(self, cuts: Mapping[str, RowCut]) -> Codec:
        """The codec for leaves that are cut inside a region, given how, by path."""
        del cuts
        return self

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

    A residual of increments grows without bound, a mean that is personal (`receive`) is lost, and
    what two residuals keep is added twice.
    """
    if not (codec.increments or codec.personal or codec.keeps_residual):
        return None
    return f"codec {codec.name} keeps what it has not sent itself: use it as it is"


@dataclasses.dataclass(frozen=True)
class Wrapper(Codec):
    """A codec around another that changes the values before they are encoded, not the payload.

    A subclass has a `name`, `init` and `encode`, and says `in_slices`.

    Attributes:
      codec: decodes, averages and counts the payloads.
      in_slices: whether the wrapped codec may be replaced by one that encodes slices, so that the
        mean of a two-shot reduction is encoded a second time, without this wrapper. False: every
        region gets all payloads (all-gather). None is refused (`two_shot.wrapper_problem`).
    """

    codec: Codec
    in_slices: ClassVar[bool | None] = None

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

    def rows_together(self, path: str, shape: tuple[int, ...]) -> int:
        return self.codec.rows_together(path, shape)

    def splits_over(self, path: str, shape: tuple[int, ...], devices: int) -> bool:
        return self.codec.splits_over(path, shape, devices)

    def with_layout(self, cuts: Mapping[str, RowCut]) -> Codec:
        return dataclasses.replace(self, codec=self.codec.with_layout(cuts))

    def mean_rank(
        self, payload_R: PyTree, weight_R: jax.Array, like: PyTree, energy: float
    ) -> jax.Array | None:
        return self.codec.mean_rank(payload_R, weight_R, like, energy)


def encode_with_residual(encode, decode, x, state, residual, decay, accepted):
    """See `Codec.encode_with_residual`, whose codec gives `encode(x, state)`, `decode(payload)`."""
    total = jax.tree.map(lambda x, e: x.astype(jnp.float32) + decay * e, x, residual)
    total = as_rounded(total)
    payload, new_state = encode(total, state)
    # What is subtracted must be the very bits that receivers decode.
    received = as_rounded(decode(payload))
    missed = jax.tree.map(jnp.subtract, total, received)
    return payload, _where(accepted, new_state, state), _where(accepted, missed, residual)


def as_rounded(tree: PyTree) -> PyTree:
    """The same fp32 values, of which every use sees the same bits; NaN for what is not finite.

    A compiler may compute a value anew for each of its uses, and make its last product and a sum
    that follows one rounding: two uses then differ in the last bit. Codes and codebooks that were
    made of values that differ so do not fit one another. A product is not joined with a sum through
    a select. (`jax.lax.optimization_barrier` does not prevent it: on CPUs the joining comes later.)
    """
    return jax.tree.map(lambda x: jnp.where(jnp.abs(x) < jnp.inf, x, jnp.nan), tree)


def _where(accepted: jax.Array | None, new: PyTree, old: PyTree) -> PyTree:
    return (
        new if accepted is None else jax.tree.map(lambda n, o: jnp.where(accepted, n, o), new, old)
    )


def weighted_mean(
    decode: Callable[[PyTree], PyTree], payload_R: PyTree, weight_R: jax.Array
) -> PyTree:
    """Decode one region at a time and average in region order (see `Codec.aggregate`)."""
    total = ordered_sum(decode, payload_R, weight_R)
    weight = fold_regions(lambda r: weight_R[r], weight_R.shape[0])
    scale = jnp.where(weight > 0, 1.0 / jnp.where(weight > 0, weight, 1.0), 0.0)
    return jax.tree.map(lambda x: x * scale, total)


def ordered_sum(
    decode: Callable[[PyTree], PyTree], payload_R: PyTree, weight_R: jax.Array
) -> PyTree:
    """Sum over regions of weight * decode(payload), one region after the other."""

    def term(r):
        one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, r, keepdims=False), payload_R)
        weight = weight_R[r]
        return jax.tree.map(lambda x: jnp.where(weight > 0, x * weight, 0.0), decode(one))

    return fold_regions(term, weight_R.shape[0])


def fold_regions(term: Callable[[Any], PyTree], regions: int) -> PyTree:
    """term(0) + term(1) + ... in this order, with one term in memory at a time."""

    def add(r, total):
        return jax.tree.map(jnp.add, total, term(r))

    # The first term is the start of the sum, not a zero: under shard_map it carries the right type.
    return jax.lax.fori_loop(1, regions, add, term(jnp.int32(0)))
