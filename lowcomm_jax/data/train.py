"""Training samples: a pure function of (seed, region, trainer, number), and iterators over it."""

import sys
from collections.abc import Sequence
from typing import Any, SupportsIndex

import grain
import numpy as np

from lowcomm_jax.data.mixing import salt
from lowcomm_jax.data.packing import Packed

Batch = dict[str, np.ndarray]
_PREPARED = 4  # steps ahead


class TrainData:
    """Sequences of every region's shard, in a seeded order, without end.

    Sample number i of a stream (region, trainer) never changes. Each epoch (i divided by the
    sequences of the shard) has all sequences of the shard, in an order drawn from (seed, region,
    trainer, epoch). The object holds no position: the caller counts the samples used of each stream
    and asks for the next ones. A restart needs only (config, positions).

    The order is that of Grain's `MapDataset.shuffle`. Should another Grain version draw another
    one, `identity` changes with it.

    Attributes:
        regions: R.
        trainers: disjoint parts of each region's shard.
        seq_len: T.
        identity: digest of everything the samples depend on. Compare it before positions are taken
            from a checkpoint: with equal identities samples are equal.
        summary: figures of the corpus for reports: its name, digests, counts, topics a region.
    """

    def __init__(
        self,
        packed: Packed,
        *,
        seed: int,
        regions: int,
        trainers: int,
        identity: str,
        summary: dict[str, Any],
    ):
        """Wrap sequences whose groups are (region 0, part 0), (region 0, part 1), ... in order."""
        self.regions = regions
        self.trainers = trainers
        self.seq_len: int = packed.seq_len
        self.identity = identity
        self.summary: dict[str, Any] = summary
        self._seed = seed
        self._packed = packed
        self._orders: dict[tuple[int, int], grain.MapDataset] = {}

    def samples(
        self,
        start: int | Sequence[int],
        count: int,
        *,
        trainer: int = 0,
        regions: Sequence[int] | None = None,
        rows: range | None = None,
    ) -> Batch:
        """Return samples [start, start + count) of each region's stream.

        Args:
            start: samples used before, one number for all regions or one a region.
            count: B, samples a region.
            trainer: any non-negative integer; trainer t reads part `t % trainers` of the shards in
                an order of its own.
            regions: region numbers to read (a job per region reads its own); None = all.
            rows: which of the B samples to read (a process reads its own); None = all.

        Returns:
            {"tokens": int32 [R, B, T+1], "mask": float32 [R, B, T]}, mask 1 = the target counts;
            with `rows`, as many of them in the place of B.

        Raises:
            ValueError: a number out of range, or not as many starts as regions.
        """
        if count < 1:
            raise ValueError(f"{count} samples: at least 1 is needed")
        chosen, start_R = self._streams(start, regions, trainer)
        asked = range(count) if rows is None else range(count)[rows.start : rows.stop]
        orders = [self._order(region, trainer) for region in chosen]
        sequence_RxB = np.array(
            [[order[first + i] for i in asked] for order, first in zip(orders, start_R.tolist())],
            np.int64,
        )
        flat = self._packed.gather(sequence_RxB.reshape(-1))
        return {name: x.reshape(*sequence_RxB.shape, x.shape[-1]) for name, x in flat.items()}

    def batches(
        self,
        start: int | Sequence[int],
        batch: int,
        *,
        steps: int | None = None,
        trainer: int = 0,
        regions: Sequence[int] | None = None,
        rows: range | None = None,
    ) -> grain.DatasetIterator:
        """Iterate over steps; a background thread prepares a few of them ahead.

        Args:
            start, trainer, regions, rows: see `samples`.
            batch: B, samples a region and step.
            steps: how many; None = without end.

        Returns:
            iterator of `samples`: step k holds [start + k B, start + (k + 1) B) of each region.

        Raises:
            ValueError: a number out of range, or not as many starts as regions.
        """
        chosen, start_R = self._streams(start, regions, trainer)
        if batch < 1 or (steps is not None and steps < 0):
            raise ValueError(f"batch={batch} must be at least 1, steps={steps} at least 0")

        def step(k: SupportsIndex) -> Batch:
            at = start_R + int(k) * batch
            return self.samples(at, batch, trainer=trainer, regions=chosen, rows=rows)

        numbers = grain.MapDataset.range(sys.maxsize if steps is None else steps)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREPARED)
        return iter(numbers.map(step).to_iter_dataset(options))

    def epoch_size(self, region: int, trainer: int = 0) -> int:
        """Return the number of samples of one pass over a stream's part of the shard."""
        first, last = self._range(region, trainer)
        return last - first

    def _order(self, region: int, trainer: int) -> grain.MapDataset:
        key = (int(region), int(trainer))
        if key not in self._orders:
            first, last = self._range(*key)
            seed = salt("order", self._seed, *key) % (1 << 32)
            order = grain.MapDataset.range(first, last).shuffle(seed=seed).repeat()
            self._orders[key] = order
        return self._orders[key]

    def _range(self, region: int, trainer: int) -> tuple[int, int]:
        if not 0 <= region < self.regions or trainer < 0:
            raise ValueError(
                f"region={region} must lie in 0..{self.regions - 1} and trainer={trainer} must "
                "not be negative"
            )
        group = region * self.trainers + trainer % self.trainers
        return int(self._packed.first_F[group]), int(self._packed.first_F[group + 1])

    def _streams(
        self, start: int | Sequence[int], regions: Sequence[int] | None, trainer: int
    ) -> tuple[list[int], np.ndarray]:
        """(regions, where each one's stream begins), of arguments that are in range."""
        chosen = list(range(self.regions)) if regions is None else [int(r) for r in regions]
        start_R = np.asarray(start, np.int64)
        if start_R.ndim > 1 or (start_R.ndim == 1 and len(start_R) != len(chosen)):
            raise ValueError(
                f"start has shape {start_R.shape}; give one number or {len(chosen)}, one a region"
            )
        if (start_R < 0).any():
            raise ValueError(f"start={start} must not be negative")
        for region in chosen:
            self._range(region, trainer)
        return chosen, np.broadcast_to(start_R, (len(chosen),))


def order_probe() -> str:
    """Return a few numbers of the order Grain draws: they change when a version draws another."""
    order = grain.MapDataset.range(97).shuffle(seed=12345).repeat()
    return " ".join(str(order[i]) for i in range(90, 120))
