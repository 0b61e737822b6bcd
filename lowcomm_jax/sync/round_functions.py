"""The pure functions of a fragment's round: payload, outer step, landing step.

`make_payload` measures the pseudo-gradient Delta = Theta - theta of every region and encodes it;
`outer_step` moves the anchor by the mean of the decoded payloads; `landing_step` lets the regions
adopt the new anchor. `accepts` decides which contributions count. `round_programs` compiles them;
nothing here looks at counters or schedules.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.placement import LARGEST
from lowcomm_jax.exchange import MeshExchange, shares
from lowcomm_jax.exchange.mesh import without_lead
from lowcomm_jax.exchange.pairs import Draw
from lowcomm_jax.mesh.regions import Regions, weighted_sum
from lowcomm_jax.methods.base import Method, Rule
from lowcomm_jax.optimizers import state_field
from lowcomm_jax.params import fragments as fragmentation
from lowcomm_jax.params.sharding import leaf_of
from lowcomm_jax.rules.merge import Merged, merge_leaves, norms_of, weigh_leaves
from lowcomm_jax.rules.outer import Mixing
from lowcomm_jax.setup import Setup
from lowcomm_jax.sync.own_parts import OwnParts

PyTree = Any
_TINY = 1e-30


# -- what the functions are given: of one fragment, or of all leaves, uncut ------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Values:
    """What regions train.

    Attributes:
      params: theta, leaves `[R, ...]`.
      rounding: of them, by name, fp32 `[R, ...]` (`Inner.rounding`).
    """

    params: dict[str, jax.Array]
    rounding: dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Senders:
    """Who sends: bool `[R]`, and float32 `[R]`, the weight of each region if it takes part."""

    takes_part: jax.Array
    weight: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AnchorState:
    """What an outer step replaces; it is donated.

    Attributes:
      anchor, outer: Theta and the outer rule's state, leaves `[A, ...]`.
      codec: `[R, ...]`, of a personal codec (`compression.Codec.receive`), else None.
      merge: the merge rule's states by leaf (`merge.initial_states`); None without a rule.
    """

    anchor: dict[str, jax.Array]
    outer: PyTree
    codec: PyTree = None
    merge: PyTree = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Contributions:
    """The payloads of all regions, and what an outer step must know of them.

    Attributes:
      payload: leaves `[R, ...]`.
      weight: float32 `[R]`; 0 = it does not count.
      brought: result of the payload's collectives (`MeshExchange.reduce`); None = none ran yet.
      counted: bool `[R]` of a personal codec: whose payload counts, of the regions here; None =
        those of a weight above 0.
      draw: with gossip, the groups of the round.
      own: of eager rules; None = the mean moves all anchors alike.
      norms: fp32 `[R, T]` of the payloads' tensors (`encode`), for a rule that reads them.
    """

    payload: PyTree
    weight: jax.Array
    brought: PyTree = None
    counted: jax.Array | None = None
    draw: Draw | None = None
    own: OwnParts | None = None
    norms: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RegionState:
    """What a landing step replaces; it is donated. `landing`: of the landing rule, `[R, ...]`."""

    values: Values
    landing: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LandingTarget:
    """What regions adopt, and where they were.

    Attributes:
      anchor: Theta', leaves `[A, ...]`.
      outer: the outer state `[A, ...]`, for methods that hand out other values than the anchor.
      snapshot: s, leaves `[R, ...]`, theta at the send; None = theta itself, where there is no
        delay.
    """

    anchor: dict[str, jax.Array]
    outer: PyTree = None
    snapshot: dict[str, jax.Array] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adoption:
    """Who adopts.

    Attributes:
      accepted, lands: bool `[R]`, whose contribution counted, and who adopts.
      staleness: int32 `[R]`, tau.
    """

    accepted: jax.Array
    lands: jax.Array
    staleness: jax.Array


@dataclasses.dataclass(frozen=True)
class RoundFunctions:
    """The functions of one method on one mesh.

    Leaves come uncut, `[R, ...]` for regions and `[A, ...]` for anchors; `rows` are the row
    numbers of sliced leaves (`params.fragments.Fragments.rows`).

    Attributes:
      setup: settings of the engine.
      exchange: takes payloads to everyone and computes their mean.
      method: the setup's, with its schedule settled (`Schedule.settle`).
      rules_K: (outer rule, landing rule) of each fragment, or of all of them.
      trained: leaf name -> bool `[R, ...]`, what each region of the run trains (`params.roles`).
    """

    setup: Setup
    exchange: MeshExchange
    method: Method
    rules_K: tuple[tuple[Rule, Rule], ...]
    trained: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def regions(self) -> Regions:
        """The regions of this job on its mesh."""
        return self.setup.placed

    # -- what counts, and how much of it ---------------------------------------------------------

    def accepts(self, norm_R: jax.Array, takes_part_R: jax.Array) -> jax.Array:
        """Bool `[R]`: participants whose contribution of this norm counts.

        Those that are not finite never do, nor those that `Setup.outlier_factor` leaves out.
        """
        accepted, most = takes_part_R & jnp.isfinite(norm_R), self.setup.outlier_factor
        if most is None:
            return accepted
        median = jnp.nanmedian(jnp.where(accepted, norm_R, jnp.nan))
        return accepted & (norm_R <= most * median)

    def clip(self, updates: PyTree, norm: jax.Array) -> tuple[PyTree, jax.Array]:
        """Scale updates `[A, ...]` of these norms `[A]` down to `Setup.max_update_norm`.

        The norm is in parameter units. It comes after the outer rule, whose momentum keeps the
        unclipped history. No published outer step is clipped. In another Optax program,
        `optax.clip_by_global_norm` behind the rule does the same (arXiv 1211.5063, Algorithm 1).

        Returns:
          (updates, their norms `[A]`).
        """
        most = self.setup.max_update_norm
        if most is None:
            return updates, norm
        scale = jnp.minimum(1.0, most / jnp.maximum(norm, _TINY))
        clipped = jax.tree.map(lambda u: u * scale.reshape(-1, *(1,) * (u.ndim - 1)), updates)
        return clipped, norm * scale

    # -- at the send ----------------------------------------------------------------------------

    def make_payload(
        self,
        values: Values,
        base,
        codec_state,
        rows,
        senders: Senders,
        *,
        with_snapshot: bool,
        level: int = 0,
    ):
        """Encode every region's pseudo-gradient Delta = Theta - theta of one fragment.

        It is 0 where the region does not train. A codec that reads the weights is given Theta, that
        Delta is measured against, as it is at the send: Theta - Delta is what Delta alone would
        make of it.

        Args:
          base: Theta, that Delta is measured against, `[A, ...]` or `[R, ...]`.
          codec_state: residuals `[R, ...]`; that of a region that takes no part stays as it is.
          rows: row numbers of sliced leaves.
          with_snapshot: whether the landing needs a copy of the local values at the send.
          level: of the codec (`Codec.at`).

        Returns:
          The dict of `encode`, with `snapshot` (None unless `with_snapshot`). If it is measured, it
          has `codec_error` `[R]`: ||decoded - Delta|| / ||Delta||, with the residual's part
          in it. Beside it stands `sent_share` `[R]`: entries that receivers decode as other than 0,
          of all. Neither is measured for codecs whose payloads are increments.
        """
        theta = fragmentation.take(values.params, rows)
        anchor = fragmentation.take(base, rows)
        rounding = fragmentation.take(values.rounding, rows)
        given, codec = (anchor, theta, rounding), self.exchange.codec
        measure = self.setup.codec_error and codec is not None and not codec.increments
        own = self._masks(theta, rows)

        def delta_of(*given):
            delta = pseudo_gradient(*given)
            return delta | {
                k: jnp.where(x[np.array(self.setup.here)], delta[k], 0) for k, x in own.items()
            }

        sent = self.encode(delta_of, given, codec_state, senders, level, measure, anchor)
        # A copy: the parameters' buffers are donated to the next inner step.
        return {**sent, "snapshot": jax.tree.map(jnp.copy, theta) if with_snapshot else None}

    def encode(
        self,
        delta_of,
        given,
        codec_state,
        senders: Senders,
        level=0,
        measure=False,
        params=None,
    ):
        """Encode values of every region, not weighted yet.

        The weights travel beside the payload, and `outer_step` applies them.

        Args:
          delta_of: `given` -> the values, fp32 leaves `[R, ...]`; cheap, since it may be called
            twice.
          codec_state: leaves `[R, ...]`.
          level: of the codec.
          measure: whether to measure `codec_error` and `sent_share`.
          params: weights for a codec that reads them, fp32 leaves `[A, ...]`.

        Returns:
          dict with payload, codec_state, `accepted` `[R]`, `weight` `[R]` (0 where not accepted),
          `delta_norm` `[R]`, `left_out` `[R]` (took part, but is not accepted), and, to `measure`,
          `codec_error` and `sent_share` (`make_payload`). For a merge rule that reads norms,
          `norms` `[R, T]`, of every tensor.
        """
        delta, takes_part_R = delta_of(*given), senders.takes_part
        norm_R, norms = self._sent_norms(delta)
        accepted = self.accepts(norm_R, takes_part_R)
        payload, new_state, measured = delta, codec_state, {}
        weight_R, exchange = jnp.where(accepted, senders.weight, 0.0), self.exchange.at(level)
        if exchange.codec is not None:
            large = 4 * sum(math.prod(x.shape[1:]) for x in delta.values()) > LARGEST
            if large:
                # Computed again behind the norm. Otherwise the program holds all of Delta from
                # there until the last leaf is encoded; so it holds that of a leaf.
                given, accepted = jax.lax.optimization_barrier((given, accepted))
                delta = delta_of(*given)
            coded = (delta, codec_state, accepted if large else None, params)
            if measure:
                payload, new_state, missed_R, share_R = exchange.encode_and_measure(*coded)
                missed_R = missed_R / jnp.maximum(norm_R, _TINY)
                measured = {"codec_error": missed_R, "sent_share": share_R}
            else:
                payload, new_state = exchange.encode(*coded)
            if not large:
                new_state = select(accepted, new_state, codec_state)
        return {
            **measured,
            **norms,
            "payload": payload,
            "codec_state": new_state,
            "accepted": accepted,
            "weight": weight_R,
            "delta_norm": norm_R,
            "left_out": takes_part_R & ~accepted,
        }

    def _sent_norms(self, delta) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(norms of all of what regions send, `[R]`; those of every tensor, if they travel)."""
        if self.method.reads != "norms":
            return self.norms(delta)[0], {}
        lifted = self.regions.lift(lambda x: norms_of(x, self.setup.stacked), (0,))
        norm_RxT = lifted(delta)
        return jnp.sqrt(jnp.sum(jnp.square(norm_RxT), axis=1)), {"norms": norm_RxT}

    def drift(self, params, anchor, rounding, rows_K, scale_K, *, names_K):
        """Distance of every region's values from the anchor, by fragment.

        Args:
          params: trained leaves of the whole model, `[R, ...]`.
          anchor: the same leaves, `[1, ...]`.
          rounding: of params (`Inner.rounding`).
          rows_K, names_K: `rows` and leaf names of each fragment.
          scale_K: float32 `[K]`, 1 / (age_p numel_p).

        Returns:
          float32 `[R, K]`: ||Theta_p - theta_p||_1 times `scale_K`.
        """
        columns = []
        for names, rows in zip(names_K, rows_K):
            theta = fragmentation.take({k: params[k] for k in names}, rows)
            origin = fragmentation.take({k: anchor[k] for k in names}, rows)
            lost = fragmentation.take({k: rounding[k] for k in names if k in rounding}, rows)
            apart = [jnp.abs(x) for x in pseudo_gradient(origin, theta, lost).values()]
            columns.append(sum(jnp.sum(x, axis=tuple(range(1, x.ndim))) for x in apart))
        return jnp.stack(columns, axis=1) * scale_K[None]

    def mean_header(self, values_RxN, weight_R, before_N):
        """Mean over the regions whose payload counts, float32 `[N]`; `before_N` if none counts.

        Values of a region of weight 0 have no effect, even if they are not finite.
        """
        counts_R = weight_R > 0
        mean = self.regions.mean({"h": values_RxN}, counts_R.astype(jnp.float32), {"h": P()})["h"]
        return jnp.where(jnp.any(counts_R), mean[0], before_N)

    # -- at the landing -------------------------------------------------------------------------

    def outer_step(
        self,
        held: AnchorState,
        sent: Contributions,
        rows,
        told=None,
        *,
        if_news=False,
        level=0,
        rules=0,
    ):
        """Step 1 of a landing: Theta <- Theta + outer(merged Delta).

        Args:
          rows: row numbers of sliced leaves.
          told: int32 `fragment`, `round` and `step`, keywords of the outer rule.
          if_news: leave the anchor alone when the mean is exactly 0, so that momentum alone does
            not move it.
          level: of the codec, at which the payload was encoded.
          rules: which of `rules_K` apply.

        Returns:
          (held, metrics `[A]`): unchanged when all weights are 0 and there are no own parts. Of an
          entry that no region of a weight trains the mean is 0, and the outer rule goes on. Where
          that rule mixes entries (`outer.Mixing`), such an entry stays, as a tensor does that a
          merge rule leaves (`Merged.moves`).
        """
        anchor, outer_state, codec_state = held.anchor, held.outer, held.codec
        weight_R = sent.weight
        base, exchange = fragmentation.take(anchor, rows), self.exchange.at(level)
        merged, rank = self.direction(sent, held.merge, outer_state, exchange, without_lead(base))
        rule, _ = self.rules_K[rules]
        mean, trained = self._of_trainers(merged.direction, weight_R, rows)
        going = merged.moves | (trained if isinstance(rule, Mixing) else {})
        reduced, new_codec_state = mean, codec_state
        if codec_state is not None:
            counted_R = weight_R > 0 if sent.counted is None else sent.counted
            mean, new_codec_state = exchange.receive(mean, codec_state, counted_R)
        updates, new_state = self._outer(rule, mean, outer_state, base, sent, exchange, told)
        if going:
            updates, new_state = left_there(going, updates, new_state, outer_state)
        mean_norm, update_norm = self.norms(reduced, updates)
        updates, update_norm = self.clip(updates, update_norm)
        moves = jnp.bool_(True) if sent.own is not None else jnp.sum(weight_R) > 0
        if if_news:
            moves &= jnp.any(mean_norm > 0)
        moved = jax.tree.map(lambda b, u: jnp.where(moves, b + u, b), base, updates)
        states = jax.tree.map(
            lambda n, o: jnp.where(moves, n, o),
            (new_state, new_codec_state, merged.state),
            (outer_state, codec_state, held.merge),
        )
        metrics = {"mean_norm": mean_norm, "update_norm": jnp.where(moves, update_norm, 0.0)}
        metrics |= {} if rank is None else {"rank": rank}
        return AnchorState(fragmentation.put(anchor, rows, moved), *states), metrics

    def direction(
        self, sent: Contributions, states, outer_state, exchange: MeshExchange, like
    ) -> tuple[Merged, jax.Array | None]:
        """What the payloads of all come to: the weighted mean, or what the merge rule makes of it.

        Args:
          states: of the merge rule; None without one.
          outer_state: of which a merge rule may read the momentum.
          like: shapes of one region's fragment.

        Returns:
          (direction, fp32 leaves `[1, ...]`; the measured rank of the mean, or None).
        """
        reads, brought, rank = self.method.reads, sent.brought, None
        if reads == "payloads":
            found = exchange.everyone(sent.payload, like, brought)
        elif reads == "norms":
            weights, states = self._weighed(sent.norms, states, sent.weight, like)
            found = exchange.weighted(sent.payload, weights, like, brought)
        else:
            energy = self.method.schedule.energy
            found, rank = exchange.reduce(sent.payload, sent.weight, like, energy, brought)
        if self.method.merge is None:
            return Merged(found, None, {}), rank
        counted = sent.weight if reads == "payloads" else jnp.ones(1)
        merged = self._merged(found, counted, states, outer_state)
        if reads == "norms":
            moves = {k: x & jnp.any(weights[k] > 0, axis=0) for k, x in merged.moves.items()}
            merged = merged._replace(moves=moves)
        return merged, rank

    def _masks(self, leaves, rows) -> dict[str, jax.Array]:
        """Of one fragment's leaves those that not all regions train whole: bool `[R, ...]`."""
        own = {name: jnp.asarray(x) for name, x in self.trained.items() if name in leaves}
        return fragmentation.take(own, rows)

    def _of_trainers(self, mean, weight_R, rows) -> tuple[dict, dict[str, jax.Array]]:
        """The mean of every entry over those who train it; whether anyone of a weight does.

        Pseudo-gradients are 0 where a region does not train, so that the mean over all is too short
        by total weight over that of those who train. Where all do, that is exactly 1.

        Args:
          mean: fp32 leaves `[1, ...]`, over all regions.

        Returns:
          (mean, bools that broadcast over a leaf of one region, of leaves with masks).
        """
        moves, scaled = {}, dict(mean)
        for name, mask in self._masks(mean, rows).items():
            total = weighted_sum(jnp.ones(weight_R.shape), weight_R)
            of_trainers = weighted_sum(mask, weight_R)
            moves[name] = of_trainers > 0
            factor = jnp.where(moves[name], total / jnp.where(moves[name], of_trainers, 1.0), 0.0)
            scaled[name] = mean[name] * factor[None]
        return scaled, moves

    def _weighed(self, norm_RxT, states, weight_R, like) -> tuple[dict, dict]:
        """The weights that the merge rule gives regions, and its states, by leaf."""

        def weigh(norm_RxT, states, weight_R):
            return weigh_leaves(
                self.method.merge, norm_RxT, states, weight_R, like, self.setup.stacked
            )

        everyones = shares.gather(self.regions, norm_RxT, P())
        return self.regions.everywhere(weigh)(everyones, states, weight_R)

    def _merged(self, delta, weight, states, outer_state) -> Merged:
        """The merge rule's result for fp32 leaves `[R, ...]`, or for their mean: `[1, ...]`."""
        rule, momentum = self.method.merge, None
        if rule.momentum is not None:
            kept = state_field(outer_state, rule.momentum)
            momentum = jax.tree.map(lambda x: x[0], kept)

        def merge(delta, states, weight, momentum):
            merged = merge_leaves(rule, delta, states, weight, momentum, self.setup.stacked)
            direction = {name: x[None] for name, x in merged.direction.items()}
            return merged._replace(direction=direction)

        return self.regions.everywhere(merge)(delta, states, weight, momentum)

    def norms(self, *trees: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        """`norm_per_row` of each, by each region for itself: no value crosses between regions.

        All in one loop over the replicas of a slot. Loops that do not depend on one another run at
        the same time on a CPU, and where a region has several processes their sums meet there.
        """

        def every(*trees):
            return tuple(map(norm_per_row, trees))

        if self.regions.slots == 1:
            return every(*trees)
        rows = [jax.tree.leaves(tree)[0].shape[0] for tree in trees]
        if len(set(rows)) > 1:
            return tuple(norm for tree in trees for norm in self.norms(tree))
        if rows[0] == 1:
            return self.regions.everywhere(every)(*trees)

        def one_region(*trees):
            return tuple(x[0] for x in every(*jax.tree.map(lambda x: x[None], trees)))

        return self.regions.lift(one_region, (0,) * len(trees))(*trees)

    def _outer(self, rule, mean, outer_state, base, sent, exchange, told):
        told, own = told or {}, sent.own
        if own is None:

            def anchors(mean, outer_state, base, told):
                def one_anchor(mean, state, params):
                    return rule.update(mean, state, params, **told)

                return jax.vmap(one_anchor)(mean, outer_state, base)

            if isinstance(rule, Mixing) and self.method.anchors == "shared":
                anchors = self.regions.everywhere(anchors)
            return anchors(mean, outer_state, base, told)
        shared = jax.tree.map(lambda x: x[0], mean)
        parts = {
            "own": self.own_part(own.payload, own.share, base, exchange),
            "own_late": self.own_part(sent.payload, own.late, base, exchange),
            "weight": own.share,
            "weight_late": own.late,
        }

        def one_region(state, params, parts):
            return rule.update(shared, state, params, **parts, **told)

        return jax.vmap(one_region)(outer_state, base, parts)

    def own_part(self, payload_R, weight_R, base, exchange):
        """Every region's decoded payload, fp32 `[R, ...]`; 0 for those left out."""
        decoded = payload_R
        if exchange.codec is not None:
            like = without_lead(base)
            decoded = exchange.decode(payload_R, like)
        return select(weight_R > 0, decoded, jax.tree.map(jnp.zeros_like, decoded))

    def landing_step(
        self, own: RegionState, target: LandingTarget, who: Adoption, rows, told, *, rules=0
    ) -> RegionState:
        """Step 2 of a landing: theta <- Theta' + T(theta - s; Theta' - s, tau) where `who.lands`.

        A region whose contribution was left out adopts Theta' itself, and so does every element
        that would otherwise land on a value that is not finite.

        Args:
          rows: row numbers of sliced leaves.
          told: int32 `fragment`, `round` and `step` (inner steps done, for schedules of the inner
            learning rate), keywords of the landing rule.
          rules: which of `rules_K` apply.
        """
        params, rounding, landing_state = own.values.params, own.values.rounding, own.landing
        snapshot, lands_R = target.snapshot, who.lands
        theta, lost = (fragmentation.take(x, rows) for x in (params, rounding))
        given = self.handed_out(fragmentation.take(target.anchor, rows), target.outer)
        _, rule = self.rules_K[rules]
        shape = {k: (theta[k].shape[0], *given[k].shape[1:]) for k in theta}
        adopted = {k: jnp.broadcast_to(given[k], shape[k]) for k in theta}
        if rule is not None:
            origin = theta if snapshot is None else snapshot
            land_one = functools.partial(_land_one, rule)
            landed, new_state = self.regions.lift(land_one, (0, 0, 0, 0, 0, 0, None))(
                theta, origin, lost, adopted, landing_state, who.staleness, told
            )
            landed = {k: jnp.where(jnp.isfinite(x), x, adopted[k]) for k, x in landed.items()}
            adopted = select(who.accepted, landed, adopted)
            landing_state = select(lands_R & who.accepted, new_state, landing_state)
        new, taken = in_leaves(adopted, theta, lost)
        new, lost = select(lands_R, (new, taken), (theta, lost))
        values = Values(
            fragmentation.put(params, rows, new), fragmentation.put(rounding, rows, lost)
        )
        return RegionState(values, landing_state)

    def handed_out(self, anchor, outer_state):
        """The values that regions receive, `[A, ...]`; without an outer state, the anchor."""
        if self.method.hands_out is None or outer_state is None:
            return anchor
        return jax.vmap(self.method.hands_out)(anchor, outer_state)

    def restart(self, params, anchor, rounding, rows):
        """Every region takes its anchor's values of these rows.

        Args:
          params: leaves `[R, ...]`.
          anchor: leaves `[A, ...]`.
          rounding: of params (`Inner.rounding`).
          rows: row numbers of sliced leaves; of the others all rows are meant.

        Returns:
          (params, rounding), with other rows as they were.
        """
        theta, target, lost = (fragmentation.take(x, rows) for x in (params, anchor, rounding))
        # A copy: with one region the result would otherwise be the anchor's own buffer.
        adopted = {k: jnp.copy(jnp.broadcast_to(target[k], x.shape)) for k, x in theta.items()}
        new, lost = in_leaves(adopted, theta, lost)
        return fragmentation.put(params, rows, new), fragmentation.put(rounding, rows, lost)

    def mark_received(self, received, anchor, outer_state, rows, lands_R):
        """Store the values that the regions of `lands_R` have just received of one fragment.

        Args:
          received: leaves `[R, ...]`.
          anchor: leaves `[A, ...]`.
          outer_state: as in `LandingTarget`.
        """
        old = fragmentation.take(received, rows)
        given = self.handed_out(fragmentation.take(anchor, rows), outer_state)
        spread = {k: jnp.broadcast_to(given[k], x.shape) for k, x in old.items()}
        return fragmentation.put(received, rows, select(lands_R, spread, old))

    def average_buffers(self, buffers, weight_R, takes_part_R):
        """Average non-trainable float leaves over the regions that count; all participants adopt.

        Regions of weight 0, or with a value that is not finite, do not count.
        """
        finite = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in buffers.values()]
        counts = (weight_R > 0) & jnp.all(jnp.stack(finite), axis=0)
        specs = {name: P() for name in buffers}
        mean = self.regions.mean(buffers, counts.astype(jnp.float32), specs)
        spread = {k: jnp.broadcast_to(mean[k], x.shape).astype(x.dtype) for k, x in buffers.items()}
        return select(takes_part_R & jnp.any(counts), spread, buffers)


def _land_one(rule, theta, origin, rounding, target, state, staleness, told):
    """One region's landing rule; fp32 inside."""
    origin = {k: x.astype(jnp.float32) for k, x in origin.items()}
    progress = {k: theta[k].astype(jnp.float32) - origin[k] for k in theta}
    origin |= {k: origin[k] + lost for k, lost in rounding.items()}
    displacement = {k: target[k] - origin[k] for k in theta}
    correction, state = rule.update(
        progress, state, target, displacement=displacement, staleness=staleness, **told
    )
    return optax.apply_updates(target, correction), state


def left_there(
    moves: dict[str, jax.Array], updates: PyTree, new: PyTree, old: PyTree
) -> tuple[PyTree, PyTree]:
    """(updates, outer state) in which tensors that do not move (`Merged.moves`) stay.

    Args:
      moves: by leaf, bools over its leading axes: a scalar, `[layers]`, or one an entry; a leaf
        that is not named goes.
      updates: leaves `[1, ...]`.
      new, old: outer states, after and before.
    """
    like = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in updates.items()}

    def goes(name: str) -> jax.Array | bool:
        if name not in moves:
            return True
        axes = moves[name].shape
        return moves[name].reshape(1, *axes, *(1,) * (len(like[name].shape) - len(axes)))

    def kept(path, after, before):
        name = leaf_of(path, new, like)
        fits = name is not None and after.shape[1:] == like[name].shape
        return jnp.where(goes(name), after, before) if fits else after

    updates = {name: jnp.where(goes(name), x, 0.0) for name, x in updates.items()}
    return updates, jax.tree_util.tree_map_with_path(kept, new, old)


def pseudo_gradient(anchor: PyTree, theta: PyTree, rounding: PyTree) -> PyTree:
    """Delta = Theta - theta, fp32 leaves `[R, ...]`.

    What a leaf narrower than fp32 lost of the values that its region took over is no progress. A
    leaf without `rounding` took over those of the anchor.
    """

    def one(k):
        wide = theta[k].astype(jnp.float32)
        if k in rounding:
            return anchor[k] - (wide + rounding[k])
        return in_leaf(anchor[k], theta[k].dtype) - wide

    return {k: one(k) for k in theta}


def rounded(method: Method, leaves: dict[str, Any]) -> list[str]:
    """Names of the leaves of which `Inner.rounding` is kept, given leaves or shapes by name.

    They are narrower than fp32, and regions take over other values than the anchor's.
    """
    if not method.lands_beside_anchor:
        return []
    return [k for k, x in leaves.items() if is_narrow(x.dtype)]


def is_narrow(dtype: Any) -> bool:
    """Whether fp32 values may not fit into a leaf of this dtype."""
    return jnp.finfo(dtype).bits < 32


def in_leaf(values: jax.Array, dtype: Any) -> jax.Array:
    """fp32 values as a leaf of this dtype holds them, fp32."""
    if not is_narrow(dtype):
        return values
    # Held, else compilers of GPUs drop the way to a narrower float and back.
    return jax.lax.optimization_barrier(values.astype(dtype)).astype(jnp.float32)


def in_leaves(values: PyTree, like: PyTree, kept: Iterable[str]) -> tuple[PyTree, PyTree]:
    """(fp32 values in the dtypes of `like`, of the names `kept` what rounding took from them)."""
    narrow = {k: x.astype(like[k].dtype) for k, x in values.items()}
    held = jax.lax.optimization_barrier({k: narrow[k] for k in kept})
    return narrow | held, {k: values[k] - x.astype(jnp.float32) for k, x in held.items()}


def norm_per_row(tree_R: dict[str, jax.Array]) -> jax.Array:
    """L2 norm over all leaves behind the leading axis, fp32 `[R]`."""
    # No reshape: it would gather leaves that are sharded inside a region.
    squares = [jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim))) for x in tree_R.values()]
    return jnp.sqrt(sum(squares))


def select(mask_R: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Per region: `new` where the mask holds, else `old`."""

    def pick(a, b):
        return jnp.where(mask_R.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)


def token_rate(tokens_RxK: jax.Array, steps_R: jax.Array, p: jax.Array) -> jax.Array:
    """tokens (tokens / steps) of fragment p in each region, float32 `[R]`."""
    tokens_R = tokens_RxK[:, p]
    return tokens_R * (tokens_R / steps_R)


def recount(tokens_RxK: jax.Array, mask_R: jax.Array, p: jax.Array) -> jax.Array:
    """The tokens with those of fragment p at 0 in the regions of the mask."""
    return tokens_RxK.at[:, p].set(jnp.where(mask_R, 0.0, tokens_RxK[:, p]))
