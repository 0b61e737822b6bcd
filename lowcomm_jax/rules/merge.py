"""Merge rules: how the payloads of those who took part become one direction, before the outer rule.

In: for one tensor, the decoded pseudo-gradients of all regions and their weights, or their mean.
Out: the direction that the outer rule descends along. Without a rule that is the weighted mean,
which the exchange reduces. A rule that reads payloads one by one costs bytes: every region then
receives those of all others. One that reads norms decides on weights, and the exchange reduces the
mean by these.

A rule is written for one tensor, and may have a state, with `init` and `update` as Optax's. All
regions hold the same state, since all merge the same payloads. `weigh_leaves` and `merge_leaves`
hand a rule every leaf of a fragment as a whole: each layer of a stacked leaf by itself, with the
kind of leaf (`optimizers.kind_of`).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from lowcomm_jax.optimizers import Kind, kind_of
from lowcomm_jax.params.fragments import is_stacked
from lowcomm_jax.refused import is_number

__all__ = [
    "NAMES",
    "Align",
    "Isotropic",
    "Merge",
    "Merged",
    "RadialDirectional",
    "initial_states",
    "merge_leaves",
    "weigh_leaves",
]

PyTree = Any
Reads = Literal["payloads", "norms", "mean"]
_TINY = 1e-12


class Merged(NamedTuple):
    """What a rule makes of the payloads of one tensor.

    Attributes:
      direction: fp32 `[...]`, to descend along.
      state: like that of `Merge.init`.
      moves: bool scalar; False = the tensor stays where it is: its anchor, and what stands under
        its leaf's name, in its leaf's shape, in the outer state.
    """

    direction: jax.Array
    state: PyTree = ()
    moves: jax.Array | bool = True


class Merge(abc.ABC):
    """How the payloads of those who took part become one direction.

    A rule is a frozen dataclass of its settings, so that checkpoints can describe it.

    Attributes:
      reads: `payloads`, `norms` or `mean`. With `payloads` the rule needs them one by one, so that
        every region receives those of all others. With `mean` it needs only their weighted mean;
        the bytes are then those of a method without a rule. With `norms` it needs the mean by
        weights of its own (`weigh`). A norm a tensor travels beside each payload, 4 bytes. Dense
        payloads are then reduced as for `mean`, on one mesh and where the method has no delay
        (`MeshExchange.weighted`); else every region receives all of them.
      momentum: name of the entry of the outer state (such as `trace` of `optax.sgd`) that the rule
        reads; None = none.
    """

    reads: ClassVar[Reads] = "payloads"
    momentum: ClassVar[str | None] = None

    def violations(self) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        return []

    def init(self, regions: int) -> PyTree:
        """The state of one tensor before the first round: arrays of a few values; () = none.

        Args:
          regions: R of the run.
        """
        del regions
        return ()

    def weigh(
        self, norm_R: jax.Array, state: PyTree, weight_R: jax.Array, kind: Kind
    ) -> tuple[jax.Array, PyTree]:
        """Weights of the regions for one tensor, of a rule that reads norms (traced).

        Args:
          norm_R: fp32 `[R]`, norms of the pseudo-gradients as their regions measured them, before a
            codec; 0 where the weight is 0.
          state, weight_R, kind: as in `update`.

        Returns:
          (`[R]`, not negative, not normalised; the state that `update` is given). A region whose
          weight was 0 keeps it. Where all have 0 the tensor stays (`Merged.moves`).
        """
        del norm_R, kind
        return weight_R, state

    @abc.abstractmethod
    def update(
        self,
        delta_RxN: jax.Array,
        state: PyTree,
        weight_R: jax.Array,
        kind: Kind,
        momentum: jax.Array | None,
    ) -> Merged:
        """Merge the payloads of one tensor (traced).

        Args:
          delta_RxN: fp32 `[R, ...]`, decoded pseudo-gradients, 0 where the weight is 0; where the
            rule `reads` the mean or norms, `[1, ...]`, the mean.
          state: of `init`, or of the tensor's round before; of `weigh` where it `reads` norms.
          weight_R: float32 `[R]`, not negative, not normalised, 0 for regions that are not counted.
            Where no region is counted all are 0, and the loop drops the result.
          kind: `matrix`, `embedding`, `head` or `vector`.
          momentum: fp32 `[...]`, from the outer state before this round; None unless the rule
            names its entry.
        """


@dataclasses.dataclass(frozen=True)
class Isotropic(Merge):
    r"""Equal singular values for the mean of a matrix; see `Merge`, reads the mean.

    $$\bar\Delta = U S V^\top \quad\longrightarrow\quad \operatorname{mean}(S)\, U V^\top$$

    for matrices of two axes, with the mean over their min(n, m) singular values; vectors stay as
    they are.

    Source: IsoLoCo's published code (arXiv 2607.03011; of the paper only the abstract was read). As
    in the code the rule holds for tensors of two axes, embeddings and head included. Differs from
    it: those named `bias` or `scale` count as vectors (`optimizers.kind_of`). Kernels of three axes
    or more, such as those with an axis of heads, keep their mean.

    A matrix that is cut over a region's devices is gathered for its SVD. Directions of singular
    value 0 get the mean, too. Rounding decides which directions these are: for a mean of low rank,
    devices with different arithmetic give different results.
    """

    reads: ClassVar[Reads] = "mean"

    def update(
        self,
        delta_RxN: jax.Array,
        state: PyTree,
        weight_R: jax.Array,
        kind: Kind,
        momentum: jax.Array | None,
    ) -> Merged:
        del weight_R, momentum
        mean = delta_RxN[0]
        if kind == "vector" or mean.ndim != 2:
            return Merged(mean, state)
        u, s, vt = jnp.linalg.svd(mean, full_matrices=False)
        return Merged(jnp.mean(s) * (u @ vt), state)


@dataclasses.dataclass(frozen=True)
class RadialDirectional(Merge):
    r"""Mean length along the mean direction; see `Merge`, reads payloads one by one.

    $$\bar\Delta = \Big(\sum_r w_r \lVert\Delta_r\rVert\Big)\;
      \varphi\Big(\sum_r w_r\,\varphi(\Delta_r)\Big), \qquad \varphi(x) = x / \lVert x\rVert,\;
      \varphi(0) = 0, \qquad \sum_r w_r = 1$$

    per tensor; embeddings get the weighted mean. Leaves are embeddings by their names
    (`optimizers.kind_of`): one of another name is averaged like a matrix. Pseudo-gradients of M
    different learners are nearly orthogonal, so that a plain mean is about $1/\sqrt M$ as long;
    this one keeps the length.

    Source: second-hand (arXiv 2604.21428; of the paper only abstract and introduction were read).
    Our reading: the printed radial factor looks like the norm of a vector sum; implementations take
    the mean of norms, as here. Where unit directions cancel (their mean is shorter than `floor`)
    the weighted mean is used, as in implementations.

    Attributes:
      floor: length of the mean of unit directions below which the weighted mean is used.
    """

    floor: float = 1e-6

    def violations(self) -> list[str]:
        if 0 <= self.floor < 1:
            return []
        return [f"floor={self.floor}: give a length of a mean of unit vectors, from 0 to below 1"]

    def update(
        self,
        delta_RxN: jax.Array,
        state: PyTree,
        weight_R: jax.Array,
        kind: Kind,
        momentum: jax.Array | None,
    ) -> Merged:
        del momentum
        shares = _share(weight_R, delta_RxN.ndim)
        mean = jnp.sum(shares * delta_RxN, axis=0)
        if kind == "embedding":
            return Merged(mean, state)
        norm_R = jax.vmap(_norm)(delta_RxN)
        scale_R = jnp.where(norm_R > 0, 1.0 / jnp.where(norm_R > 0, norm_R, 1.0), 0.0)
        unit_RxN = delta_RxN * scale_R.reshape(shares.shape)
        direction = jnp.sum(shares * unit_RxN, axis=0)
        length, radius = _norm(direction), jnp.sum(shares.reshape(-1) * norm_R)
        whole = length > self.floor
        long = direction * (radius / jnp.where(whole, length, 1.0))
        return Merged(jnp.where(whole, long, mean), state)


@dataclasses.dataclass(frozen=True)
class Align(Merge):
    r"""Alignment with the outer momentum, for arrivals one at a time; see `Merge`, reads the mean.

    With m the outer momentum, $\hat x = x / \lVert x\rVert$, $c = \cos(\Delta, m)$ and
    $q = \lVert\Delta\rVert / (\lVert\Delta\rVert + \kappa \lVert m\rVert + \epsilon)$:

    $$\Delta \leftarrow \begin{cases}
      \Delta & c \ge c_{ok} \\
      \Delta - \beta\, c\, \lVert\Delta\rVert\, \hat m, \quad
        \beta = \min(-k_s\, c\, q,\; \beta_{max}) & c < 0 \\
      \lVert\Delta\rVert\; \widehat{(1-\lambda)\hat\Delta + \lambda \hat m}, \quad
        \lambda = \min(k_d (1 - c)\, q,\; 1) & \text{else}
    \end{cases}$$

    An arrival that points against the momentum loses a part of that component; one that points
    aside is turned towards the momentum. Where m is 0, as before the first arrival, $\Delta$ stays.

    Source: HeLoCo's published code, where the defaults are from (arXiv 2606.00271; of the paper
    only notes were read). Differs from it: the code merges one arrival at a time; of several
    payloads at once this rule reads the mean.

    The outer state needs an entry `momentum`, as that of `outer.momentum_average` has.

    Attributes:
      enough: c_ok, cosine from which an arrival stays as it is, in [0, 1].
      removal: k_s, strength of the removal; 0 = off.
      most: beta_max, bound of the removal; 0 = off.
      turn: k_d, strength of the turn; 0 = off.
      confidence: kappa, weight of the momentum's length, not negative.
    """

    enough: float = 0.2
    removal: float = 0.5
    turn: float = 1.0
    confidence: float = 3.0
    most: float = 0.5
    reads: ClassVar[Reads] = "mean"
    momentum: ClassVar[str | None] = "momentum"

    def violations(self) -> list[str]:
        found = []
        if not (is_number(self.enough) and 0 <= self.enough <= 1):
            found.append(f"enough={self.enough!r}: give a cosine from 0 to 1")
        for name in ("removal", "turn", "confidence", "most"):
            value = getattr(self, name)
            if not (is_number(value) and value >= 0):
                found.append(f"{name}={value!r}: give 0 (off) or a positive number")
        return found

    def update(
        self,
        delta_RxN: jax.Array,
        state: PyTree,
        weight_R: jax.Array,
        kind: Kind,
        momentum: jax.Array | None,
    ) -> Merged:
        del kind, weight_R
        delta = delta_RxN[0]
        length, long = _norm(delta), _norm(momentum)
        m_hat = momentum / jnp.maximum(long, _TINY)
        cosine = jnp.sum(delta * m_hat) / jnp.maximum(length, _TINY)
        certain = length / (length + self.confidence * long + _TINY)
        beta = jnp.minimum(self.removal * -cosine * certain, self.most)
        against = delta - beta * cosine * length * m_hat
        lam = jnp.minimum(self.turn * (1 - cosine) * certain, 1.0)
        turned = (1 - lam) * delta / jnp.maximum(length, _TINY) + lam * m_hat
        aside = length * turned / jnp.maximum(_norm(turned), _TINY)
        kept = (cosine >= self.enough) | (long <= _TINY) | (length <= _TINY)
        return Merged(jnp.where(kept, delta, jnp.where(cosine < 0, against, aside)), state)


NAMES: dict[str, type[Merge]] = {
    "align": Align,
    "isotropic": Isotropic,
    "radial_directional": RadialDirectional,
}


def initial_states(
    rule: Merge, like: Mapping[str, Any], regions: int, stacked: Sequence[str]
) -> dict[str, PyTree]:
    """The rule's state for every tensor of a fragment: by leaf, `[layers, ...]` of a stack.

    Args:
      like: leaves or their shapes by name, of one region.
      regions: R of the run.
      stacked: as in `merge_leaves`.
    """

    def of_leaf(name: str, shape: tuple[int, ...]) -> PyTree:
        lead = shape[:1] if is_stacked(name, stacked) else ()
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*lead, *x.shape)), rule.init(regions))

    return {name: of_leaf(name, x.shape) for name, x in like.items()}


def weigh_leaves(
    rule: Merge,
    norm_RxT: jax.Array,
    states: dict[str, PyTree],
    weight_R: jax.Array,
    like: Mapping[str, Any],
    stacked: Sequence[str],
) -> tuple[dict[str, jax.Array], dict[str, PyTree]]:
    """The weights and new states of every tensor, of a rule that reads norms (traced).

    Args:
      norm_RxT: fp32, of all tensors in the order of `like` (`tensors`).
      states, stacked: as in `merge_leaves`.
      like: leaves or their shapes by name, of one region.

    Returns:
      Each by leaf: float32 `[R]`, or `[R, layers]` of a stack, and states.
    """
    norm_RxT = jnp.where(weight_R[:, None] > 0, norm_RxT, 0.0)
    weights, new, start = {}, {}, 0
    for name, x in like.items():
        kind = kind_of(name, jax.ShapeDtypeStruct(x.shape, x.dtype), stacked)

        def tensor(norm_R, state, kind=kind):
            found_R, state = rule.weigh(norm_R, state, weight_R, kind)
            if jnp.shape(found_R) != weight_R.shape:
                shape = list(jnp.shape(found_R))
                raise TypeError(
                    f"merge: {type(rule).__name__}.weigh returns weights {shape} of "
                    f"{len(weight_R)} regions: return one a region, float32 [R], and the state"
                )
            return jnp.where(weight_R > 0, found_R.astype(jnp.float32), 0.0), state

        if is_stacked(name, stacked):
            norms = norm_RxT[:, start : start + x.shape[0]]
            start += x.shape[0]
            weights[name], new[name] = jax.vmap(tensor, (1, 0), (1, 0))(norms, states[name])
        else:
            weights[name], new[name] = tensor(norm_RxT[:, start], states[name])
            start += 1
    return weights, new


def tensors(like: Mapping[str, Any], stacked: Sequence[str]) -> int:
    """Number of tensors of leaves or shapes of one region: each layer of a stack is one."""
    return sum(x.shape[0] if is_stacked(name, stacked) else 1 for name, x in like.items())


def norms_of(delta: Mapping[str, jax.Array], stacked: Sequence[str]) -> jax.Array:
    """Norms of all tensors of one region's leaves, fp32 `[T]`, for `weigh_leaves` (traced)."""
    return jnp.concatenate(
        [
            jax.vmap(_norm)(x) if is_stacked(name, stacked) else _norm(x)[None]
            for name, x in delta.items()
        ]
    )


def merge_leaves(
    rule: Merge,
    delta_R: dict[str, jax.Array],
    states: dict[str, PyTree],
    weight_R: jax.Array,
    momentum: dict[str, jax.Array] | None,
    stacked: Sequence[str],
) -> Merged:
    """Apply a rule to every tensor of a fragment (traced).

    Args:
      rule: to apply.
      delta_R: fp32 leaves `[R, ...]` by name; `[1, ...]` where the rule reads the mean or norms.
      states: of `initial_states`, or of `weigh_leaves`.
      weight_R: float32 `[R]`, or `[1]`.
      momentum: leaves `[...]` by name, or None.
      stacked: path prefixes of leaves with a leading layer axis; each layer is a tensor.

    Returns:
      Each by leaf: fp32 `[...]`, states, and bools, `[layers]` of a stack and else scalars.
    """

    def of_leaf(name: str, x_RxN: jax.Array) -> Merged:
        kind = kind_of(name, jax.ShapeDtypeStruct(x_RxN.shape[1:], x_RxN.dtype), stacked)
        counts = (weight_R > 0).reshape(-1, *(1,) * (x_RxN.ndim - 1))
        silenced = jnp.where(counts, x_RxN, 0.0)
        old = None if momentum is None else momentum[name]

        def tensor(x, state, m):
            merged = rule.update(x, state, weight_R, kind, m)
            if not isinstance(merged, Merged):
                raise TypeError(
                    f"merge: {type(rule).__name__}.update returns something else than a Merged: "
                    "return a lowcomm_jax.merge.Merged"
                )
            return merged._replace(moves=jnp.asarray(merged.moves, bool))

        if is_stacked(name, stacked):
            axes = (1, 0, None if old is None else 0)
            return jax.vmap(tensor, in_axes=axes)(silenced, states[name], old)
        return tensor(silenced, states[name], old)

    merged = {name: of_leaf(name, x) for name, x in delta_R.items()}
    return Merged(*({name: one[i] for name, one in merged.items()} for i in range(3)))


def _share(weight_R: jax.Array, ndim: int) -> jax.Array:
    """Weights normalised to a sum of 1, shaped to multiply `[R, ...]` of `ndim` axes."""
    total = jnp.sum(weight_R)
    shares = weight_R / jnp.where(total > 0, total, 1.0)
    return shares.reshape(-1, *(1,) * (ndim - 1))


def _norm(x: jax.Array) -> jax.Array:
    """L2 norm of a whole tensor, fp32 `[]`; without a reshape, which would gather a sharded one."""
    return jnp.sqrt(jnp.sum(jnp.square(x)))
