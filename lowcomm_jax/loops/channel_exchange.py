"""Channels inside the program of the inner steps: what their sends and landings compute.

Channels exchange often, SPARTA after every step. Their exchanges are therefore part of the inner
program, as those of gradients are (`gradient_exchange`). A block of steps is one call whatever its
channels do, and the host only counts (`channel_loop`). After inner step t, for each channel:

1. Values sent at t - delay land: their mean, or what the channel's landing rule makes of it,
   overwrites the selected entries of the regions that took part in the send.
2. If t is a multiple of `every`, values leave.
3. Without a delay they land at once.

With a delay the mean that lands after a step does not depend on that step, so that the compiler may
exchange it beside the step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from lowcomm_jax.channels import Channel
from lowcomm_jax.channels.source import Leaves, Source
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.exchange.entries import band_sizes, put_entries, take_entries
from lowcomm_jax.exchange.mesh import without_lead
from lowcomm_jax.mesh.regions import REGION, Regions
from lowcomm_jax.state.channel_flights import ChannelFlights, Kept
from lowcomm_jax.sync.initial_state import Making
from lowcomm_jax.sync.round_functions import RoundFunctions, in_leaf, in_leaves, select
from lowcomm_jax.train.inner_step import InnerStep, empty_log, inner_block, squeeze

PyTree = Any
_LANES = 128  # values of a TPU's vector register, across
VALUES = "values"  # the name under which selected entries travel


@dataclasses.dataclass(frozen=True)
class ChannelExchange:
    """The pure functions of one channel on one mesh.

    Attributes:
      channel: which values are averaged, and when.
      source: the leaves that hold them.
      shapes, specs: shapes of these leaves in one region, and their PartitionSpecs inside it.
      exchange: takes payloads to everyone.
      functions: norms, and which contributions count.
      seed: of the run; with the channel's name it decides which entries travel.
    """

    channel: Channel
    source: Source
    shapes: dict[str, jax.ShapeDtypeStruct]
    specs: dict[str, P]
    exchange: MeshExchange
    functions: RoundFunctions
    seed: int

    @property
    def regions(self) -> Regions:
        return self.exchange.regions

    @property
    def whole(self) -> bool:
        """Whether leaves travel as they are, so that no entry is taken out of them."""
        return self.channel.selection.whole

    @property
    def like(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One region's values before the codec, fp32."""
        if self.whole:
            return {k: jax.ShapeDtypeStruct(x.shape, np.float32) for k, x in self.shapes.items()}
        return {VALUES: jax.ShapeDtypeStruct((sum(self._counts),), np.float32)}

    @functools.cached_property
    def _sizes(self) -> dict[str, list[int]]:
        """Entries of each band of each leaf."""
        return {name: band_sizes(x.shape) for name, x in self.shapes.items()}

    @property
    def _counts(self) -> list[int]:
        """Selected entries of each band, leaf after leaf."""
        return [self.channel.selection.count(size) for size in self._all_sizes]

    @property
    def _all_sizes(self) -> list[int]:
        return [size for sizes in self._sizes.values() for size in sizes]

    # -- which entries ----------------------------------------------------------------------------

    def indices(self, number: jax.Array) -> Sequence[jax.Array]:
        """The selected entries of each band in exchange `number`; the same in all regions.

        () where leaves travel as they are.
        """
        return () if self.whole else self.regions.everywhere(self._drawn)(number)

    def _drawn(self, number: jax.Array) -> Sequence[jax.Array]:
        salt = zlib.crc32(self.channel.name.encode()) & (2**31 - 1)
        key = jax.random.fold_in(jax.random.key(self.seed), salt)
        return self.channel.selection.indices(key, number, self._all_sizes)

    def _fillable(self, kept: Kept | None, number: jax.Array) -> jax.Array | None:
        """Places of exchange `number` whose entry is not under way, bool `[R, N]`.

        Under way are the filled places of the `slots - 1` exchanges before it; `kept` has them.
        None where all places are always filled.
        """
        if kept is None or self.whole:
            return None
        if self.channel.slots == 1:
            return jnp.ones((self.regions.count, kept.filled.shape[-1]), bool)
        earlier_S = number - jnp.arange(1, self.channel.slots)

        def places(number, earlier_S):
            """(where each entry of `number` would stand in the earlier ones, whether it does)."""
            drawn = self._drawn(number)

            def in_one(earlier):
                stands, there, start = [], [], 0
                for index, other in zip(drawn, self._drawn(earlier)):
                    place = jnp.minimum(jnp.searchsorted(other, index), other.shape[0] - 1)
                    stands.append(start + place)
                    there.append(other[place] == index)
                    start += other.shape[0]
                return jnp.concatenate(stands), jnp.concatenate(there)

            return jax.vmap(in_one)(earlier_S)

        stands_SxN, there_SxN = self.regions.everywhere(places)(number, earlier_S)
        filled_S = kept.filled[:, earlier_S % self.channel.slots]
        filled_S = jnp.take_along_axis(filled_S, stands_SxN[None], axis=2)
        return ~jnp.any(there_SxN[None] & filled_S, axis=1)

    def take(self, leaves: Leaves, indices) -> dict[str, jax.Array]:
        """The values of these entries before the codec: fp32 `[R, ...]`."""
        values, rounding = leaves
        if self.whole:
            wide = {k: x.astype(jnp.float32) for k, x in values.items()}
            return wide | {k: wide[k] + lost for k, lost in rounding.items()}
        found = take_entries(self.regions, *self._in_order(values, indices))
        if rounding:
            lost = take_entries(self.regions, *self._in_order(rounding, indices))
            found = found.at[:, self._places(rounding)].add(lost)
        return {VALUES: found}

    def put(self, leaves: Leaves, new, indices, adopts_R, filled_RxN=None) -> Leaves:
        """The leaves with new values in these entries of the regions that adopt them.

        Args:
          new: fp32 `[1, ...]` for all regions, or `[R, ...]` with `filled_RxN`.
          adopts_R: bool `[R]`.
          filled_RxN: bool, places that hold an entry; None = all.
        """
        values, rounding = leaves
        if self.whole:
            spread = {k: jnp.broadcast_to(new[k], x.shape) for k, x in values.items()}
            return select(adopts_R, in_leaves(spread, values, rounding), leaves)
        lead, adopts = 0, adopts_R
        if filled_RxN is not None:
            lead, adopts = slice(None), adopts_R[:, None] & filled_RxN
        written = self._overwritten(values, indices, new[VALUES][lead], adopts)
        if rounding:
            at = {k: x for k, x in self._segments().items() if k in rounding}
            lost = [
                new[VALUES][lead, x] - in_leaf(new[VALUES][lead, x], values[k].dtype)
                for k, x in at.items()
            ]
            if filled_RxN is not None:
                adopts = jnp.concatenate([adopts[:, x] for x in at.values()], axis=1)
            rounding = self._overwritten(rounding, indices, jnp.concatenate(lost, axis=-1), adopts)
        return written, rounding

    def _overwritten(self, leaves, indices, values, adopts) -> dict[str, jax.Array]:
        new = put_entries(self.regions, *self._in_order(leaves, indices), values, adopts)
        return dict(zip(self._order(leaves), new))

    def _order(self, leaves) -> list[str]:
        """Names in the source's order; a branch sorts them."""
        return [k for k in self.shapes if k in leaves]

    def _in_order(self, leaves, indices) -> tuple[list, Sequence, list]:
        """Leaves, their indices and specs in the source's order."""
        names, rest = self._order(leaves), iter(indices)
        of_leaf = {name: [next(rest) for _ in sizes] for name, sizes in self._sizes.items()}
        indices = [index for name in names for index in of_leaf[name]]
        return [leaves[k] for k in names], indices, [self.specs[k] for k in names]

    def _segments(self) -> dict[str, slice]:
        """Where the values of each leaf stand among those of all."""
        count = self.channel.selection.count
        ends = np.cumsum([sum(map(count, x)) for x in self._sizes.values()]).tolist()
        return {k: slice(start, end) for k, start, end in zip(self.shapes, [0, *ends], ends)}

    def _places(self, leaves) -> np.ndarray:
        """int `[n]`: where the values of these leaves stand among those of all."""
        at = self._segments()
        return np.concatenate([np.arange(at[k].start, at[k].stop) for k in self._order(leaves)])

    # -- sends and landings -----------------------------------------------------------------------

    def send(self, leaves, indices, takes_part_R, weight_R, fillable_RxN=None):
        """Encode what every region hands over.

        A region whose values do not count (`RoundFunctions.accepts`) has weight 0.

        Args:
          fillable_RxN: bool, places to fill; None = all.

        Returns:
          (payload `[R, ...]`, weight `[R]`, `Kept` without slots or None), left out `[R]`.
        """
        values = self.take(leaves, indices)
        if fillable_RxN is not None:
            values = {VALUES: jnp.where(fillable_RxN, values[VALUES], 0.0)}
        [norm_R] = self.functions.norms(values)
        accepted_R = self.functions.accepts(norm_R, takes_part_R)
        payload = values
        if self.exchange.codec is not None:
            state = self.exchange.codec.init(self.like)
            payload, _ = self.exchange.encode(values, state)
        kept, filled_RxN = None, fillable_RxN
        if filled_RxN is not None:
            filled_RxN = filled_RxN & jnp.any(takes_part_R)
        if self.channel.landing is not None:
            kept = Kept(values, filled_RxN, accepted_R)
        sent = payload, jnp.where(accepted_R, weight_R, 0.0), kept
        return sent, takes_part_R & ~accepted_R

    def mean(self, payload, weight_R) -> tuple[PyTree, dict[str, jax.Array]]:
        """The mean over the regions that count, `[1, ...]`, and its measurements, `[R]`.

        `spread` is the root mean square distance of a region's values from the mean, 0 for regions
        that do not count. It is not measured where the channel has a codec.
        """
        mean = self._reduce(payload, weight_R)
        if self.exchange.codec is not None:
            return mean, {}
        counts = sum(math.prod(x.shape) for x in self.like.values())
        apart = {k: x - mean[k] for k, x in payload.items()}
        [norm_R] = self.functions.norms(apart)
        spread_R = norm_R / math.sqrt(counts)
        return mean, {"spread": jnp.where(weight_R > 0, spread_R, 0.0)}

    def _reduce(self, payload, weight_R) -> PyTree:
        mesh = self.regions.mesh
        on_tpu = mesh.devices.flat[0].platform == "tpu"
        if self.whole or self.exchange.codec is not None or not on_tpu or self.regions.slots == 1:
            return self.exchange.reduce(payload, weight_R, self.like).mean
        # Each device's share in whole lanes: of others a TPU makes all-reduces, up to twice the
        # bytes.
        (count,) = self.like[VALUES].shape
        fill = -count % (_LANES * mesh.size)
        wider = {VALUES: jnp.pad(payload[VALUES], ((0, 0), (0, fill)))}
        like = {VALUES: jax.ShapeDtypeStruct((count + fill,), np.float32)}
        mean = self.exchange.reduce(wider, weight_R, like).mean
        return {VALUES: mean[VALUES][:, :count]}

    def average(self, leaves, number, takes_part_R, weight_R, adopts_R):
        """A send that lands at once: (leaves, values `[R]`)."""
        indices = self.indices(number)
        (payload, weight_R, _), left_out_R = self.send(leaves, indices, takes_part_R, weight_R)
        mean, values = self.mean(payload, weight_R)
        leaves = self.put(leaves, mean, indices, adopts_R & jnp.any(weight_R > 0))
        return leaves, {"left_out": left_out_R.astype(jnp.float32), **values}

    def landed(self, leaves, mean, indices, kept: Kept | None, number, at):
        """What regions adopt: mean + T(now - sent), fp32 `[R, ...]`; without a rule the mean.

        As in `RoundFunctions.landing_step` regions whose contribution was left out adopt the mean
        itself, and so does every entry that would not be finite.

        Args:
          mean: fp32 `[1, ...]`.
          kept: of the slot.
          number, at: int32, of the exchange and of the step.
        """
        rule, staleness = self.channel.landing, jnp.int32(self.channel.delay)
        if kept is None:
            return mean

        def one(now, sent, mean, number, at):
            progress, displacement = (jax.tree.map(jnp.subtract, x, sent) for x in (now, mean))
            told = {"displacement": displacement, "staleness": staleness, "round": number}
            correction, _ = rule.update(progress, rule.init(mean), mean, **told, step=at)
            return optax.apply_updates(mean, correction)

        now = self.take(leaves, indices)
        mean = {k: jnp.broadcast_to(x, now[k].shape) for k, x in mean.items()}
        given = now, kept.values, mean, number, at
        landed = self.regions.lift(one, (0, 0, 0, None, None))(*given)
        landed = {k: jnp.where(jnp.isfinite(x), x, mean[k]) for k, x in landed.items()}
        return select(kept.accepted, landed, mean)

    # -- inside the inner program -----------------------------------------------------------------

    def empty(self) -> tuple[PyTree, jax.Array, Kept | None] | tuple[()]:
        """Slots that hold nothing (`ChannelFlights.on_devices`); () without a delay."""
        if not self.channel.delay:
            return ()
        count, slots = self.regions.count, self.channel.slots

        def zeros(like):
            return jax.tree.map(lambda x: jnp.zeros((count, slots, *x.shape), x.dtype), like)

        payload = jax.eval_shape(self._payload_like)
        kept = None
        if self.channel.landing is not None:
            filled = None if self.whole else jax.ShapeDtypeStruct(self.like[VALUES].shape, bool)
            kept = zeros(Kept(self.like, filled, jax.ShapeDtypeStruct((), bool)))
        return zeros(without_lead(payload)), jnp.zeros((count, slots), jnp.float32), kept

    def _payload_like(self):
        count = self.regions.count
        values = {k: jnp.zeros((count, *x.shape)) for k, x in self.like.items()}
        if self.exchange.codec is None:
            return values
        state = self.exchange.codec.init(self.like)
        return self.exchange.encode(values, state)[0]

    def bring(self, flights, at: jax.Array) -> tuple[PyTree, dict[str, jax.Array]] | None:
        """The mean of the payloads that land after step `at`; None for a channel without delay."""
        if not self.channel.delay:
            return None
        payload, weight, _ = flights
        sent = at - self.channel.delay
        slot = self._slot(sent)

        def mean():
            return self.mean(jax.tree.map(lambda x: x[:, slot], payload), weight[:, slot])

        return self._when(self._due(sent), mean)

    def after_step(self, leaves, flights, brought, at, takes_part_R, lands_R, weight_R):
        """Landing and send after step `at`.

        Args:
          leaves: of the source.
          flights: `ChannelFlights.on_devices`, or () without a delay.
          brought: result of `bring`.
          takes_part_R: bool `[R]`, who takes part in a send.
          lands_R: bool `[R]`, in which regions the due payload lands.
          weight_R: float32 `[R]`.

        Returns:
          (leaves, flights, values `[R]`).
        """
        channel, number = self.channel, at // self.channel.every - 1
        if not channel.delay:
            kept = (leaves, self._no_values())

            def average():
                return self.average(leaves, number, takes_part_R, weight_R, takes_part_R)

            leaves, values = self._when(self._due(at), average, kept)
            return leaves, flights, values
        sent, (mean, values) = at - channel.delay, brought
        _, weight, kept = flights

        def land():
            slot, earlier = self._slot(sent), sent // channel.every - 1
            adopts_R, indices = lands_R & jnp.any(weight[:, slot] > 0), self.indices(earlier)
            own = jax.tree.map(lambda x: x[:, slot], kept)
            new = self.landed(leaves, mean, indices, own, earlier, at)
            return self.put(leaves, new, indices, adopts_R, None if own is None else own.filled)

        landed = self._when(self._due(sent), land, leaves)
        slot = self._slot(at)

        def send():
            fillable = None if kept is None else self._fillable(kept, number)
            given = landed, self.indices(number), takes_part_R, weight_R, fillable
            new, left_out = self.send(*given)
            put = jax.tree.map(lambda x, y: x.at[:, slot].set(y), flights, new)
            return put, left_out.astype(jnp.float32)

        flights, left_out = self._when(self._due(at), send, (flights, self._zeros()))
        return landed, flights, {"left_out": left_out, **values}

    def upcoming(self, step: jax.Array) -> jax.Array:
        """The first step after `step` after which a payload lands or leaves (traced)."""
        every, delay = self.channel.every, self.channel.delay
        leaves = (step // every + 1) * every
        lands = jnp.maximum(((step - delay) // every + 1) * every, every) + delay
        return jnp.minimum(leaves, lands) if delay else leaves

    def _due(self, sent: jax.Array) -> jax.Array:
        return (sent > 0) & (sent % self.channel.every == 0)

    def _slot(self, sent: jax.Array) -> jax.Array:
        """`Channel.slot`, traced."""
        return (sent // self.channel.every - 1) % self.channel.slots

    def _when(self, due: jax.Array, act: Callable[[], Any], otherwise: Any = None) -> Any:
        """`act()` if `due`; else `otherwise`, or zeros. Without a branch where it is always due."""
        if self.channel.every == 1:
            return act()
        if otherwise is None:
            shapes = jax.eval_shape(act)
            otherwise = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.cond(due, act, lambda: otherwise)

    def _zeros(self) -> jax.Array:
        return jnp.zeros(self.regions.count, jnp.float32)

    def _no_values(self) -> dict[str, jax.Array]:
        measured = {} if self.exchange.codec is not None else {"spread": self._zeros()}
        return {"left_out": self._zeros(), **measured}


def make_channel_program(step: InnerStep, regions: Regions, channels: Sequence[ChannelExchange]):
    """Build the program of inner steps with their channels, not yet jitted.

    Returns:
      `block((inner, flights), frozen, batches, region_keys, takes_part, lands, weight, done, n,
      single)`, which runs the first n of S staged steps.

      - `flights`, `lands`: an entry for each channel; every `lands`, and `takes_part`, bool
        `[R, S]`.
      - `weight`: float32 `[R]`; `done`: int32, the steps made before; `single`: static.
      - Its result: ((inner, flights), metrics `[R, S]`, or `[R]` with `single`). Metrics of a
        channel are `<channel>_left_out` and `<channel>_spread`.
    """
    parts = inner_block(step, regions)

    def steps(first, end, inner, flights, log, given, takes_part, lands, weight, done):
        """Steps `first` to `end` of the block, and what channels do after the last of them."""
        at, last = done + end, end - 1
        brought = [c.bring(f, at) for c, f in zip(channels, flights)]
        inner, log = parts.steps((inner, log), *given, first, end)
        found, seen = [], {}
        for channel, flight, mean, lands_RxS in zip(channels, flights, brought, lands):
            leaves = channel.source.take(inner)
            masks = takes_part[:, last], lands_RxS[:, last], weight
            leaves, flight, values = channel.after_step(leaves, flight, mean, at, *masks)
            inner = channel.source.put(inner, leaves)
            found.append(flight)
            seen |= {f"{channel.channel.name}_{k}": v for k, v in values.items()}
        return inner, tuple(found), log, seen

    def block(
        carry, frozen, batches, region_keys, takes_part, lands, weight, done, n, single=False
    ):
        inner, flights = carry
        given = (frozen, batches, region_keys, None)
        rest = (given, takes_part, lands, weight, done)
        start = jnp.int32(0)
        log = parts.empty(inner, *given)
        shapes = jax.eval_shape(steps, start, start, inner, flights, log, *rest)[3]
        told = empty_log(shapes, takes_part.shape[1])

        def body(loop):
            first, inner, flights, log, told = loop
            upcoming = [c.upcoming(done + first) for c in channels]
            end = jnp.minimum(n, jnp.stack(upcoming).min() - done)
            inner, flights, log, seen = steps(first, end, inner, flights, log, *rest)
            told = jax.tree.map(lambda buffer, v: buffer.at[:, end - 1].set(v), told, seen)
            return end, inner, flights, log, told

        loop = (start, inner, flights, log, told)
        _, inner, flights, log, told = jax.lax.while_loop(lambda loop: loop[0] < n, body, loop)
        log = {**log, **told}
        return (inner, flights), squeeze(log) if single else log

    return block


def initial_flights(
    channels: Sequence[ChannelExchange], making: Making
) -> dict[str, ChannelFlights]:
    """Empty slots of every channel that has a delay, on the mesh."""
    found = {}
    for one in channels:
        if one.channel.delay:
            lies = one.regions.sharding(REGION)
            slots = making.run(jax.jit(one.empty, out_shardings=lies), lies)
            nobody = np.zeros((one.regions.count, one.channel.slots), bool)
            found[one.channel.name] = ChannelFlights(*slots, nobody)
    return found
