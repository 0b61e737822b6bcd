"""Training samples: a pure function of (seed, region, trainer, number), and iterators over it."""

import sys
from collections.abc import Sequence
from typing import Any, SupportsIndex

import grain
import numpy as np

from lowcomm_jax.data.mixing import salt
from lowcomm_jax.data.packing import Packed

Batch = dict[str, np.ndarray]


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

    def samples(self, region: int, start: int, count: int, trainer: int = 0) -> Batch:
        """Return samples [start, start + count) of a stream.

        Args:
            region: 0 to regions - 1.
            start: samples of this stream used before; any non-negative integer.
            count: how many.
            trainer: any non-negative integer; trainer t reads part `t % trainers` of the shard in
                an order of its own.

        Returns:
            {"tokens": int32 [count, T+1], "mask": float32 [count, T]}, mask 1 = the target counts.

        Raises:
            ValueError: a number out of range.
        """
        return self._packed.gather(self._sequences(region, start, count, trainer))

    def stage(
        self,
        start: int | Sequence[int],
        steps: int,
        batch: int,
        *,
        trainer: int = 0,
        regions: Sequence[int] | None = None,
        samples: range | None = None,
    ) -> Batch:
        """Return the samples of n steps of all regions, gathered at once.

        Args:
            start: samples used before, one number for all regions or one a region.
            steps: n.
            batch: B, samples a region and step.
            trainer: see `samples`.
            regions: region numbers to read (a job per region reads its own); None = all.
            samples: which of the B samples to read (a process reads its own); None = all.

        Returns:
            {"tokens": int32 [n, R, B, T+1], "mask": float32 [n, R, B, T]}; with `samples`, as many
            of them in the place of B.

        Raises:
            ValueError: a number out of range, or not as many starts as regions.
        """
        chosen, starts = self._streams(start, regions, trainer)
        if steps < 1 or batch < 1:
            raise ValueError(f"steps={steps} and batch={batch} must be at least 1")
        rows = [
            self._sequences(region, first, steps * batch, trainer).reshape(steps, batch)
            for region, first in zip(chosen, starts, strict=True)
        ]
        sequence_nxRxB = np.stack(rows, axis=1)
        if samples is not None:
            sequence_nxRxB = sequence_nxRxB[:, :, samples.start : samples.stop]
        flat = self._packed.gather(sequence_nxRxB.reshape(-1))
        return {
            name: value.reshape(*sequence_nxRxB.shape, value.shape[-1])
            for name, value in flat.items()
        }

    def batches(
        self,
        start: int | Sequence[int],
        batch: int,
        *,
        steps: int | None = None,
        trainer: int = 0,
        regions: Sequence[int] | None = None,
        samples: range | None = None,
        prefetch: int = 4,
    ) -> grain.DatasetIterator:
        """Iterate over steps, prepared by a background thread.

        Args:
            start, batch, trainer, regions, samples: see `stage`.
            steps: how many; None = without end.
            prefetch: steps prepared ahead; 0 = none, in the caller's thread.

        Returns:
            iterator of {"tokens": int32 [R, B, T+1], "mask": float32 [R, B, T]}; step k holds the
            samples [start + k B, start + (k + 1) B) of each region.

        Raises:
            ValueError: a number out of range, or not as many starts as regions.
        """
        chosen, starts = self._streams(start, regions, trainer)
        if batch < 1 or (steps is not None and steps < 0):
            raise ValueError(f"batch={batch} must be at least 1, steps={steps} at least 0")

        def step(k: SupportsIndex) -> Batch:
            at = [first + int(k) * batch for first in starts]
            one = self.stage(at, 1, batch, trainer=trainer, regions=chosen, samples=samples)
            return {name: value[0] for name, value in one.items()}

        numbers = grain.MapDataset.range(sys.maxsize if steps is None else steps)
        options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        return iter(numbers.map(step).to_iter_dataset(options))

    def dataset(self, region: int, trainer: int = 0) -> grain.MapDataset:
        """Return a stream as a Grain data set of single samples, to build other pipelines on.

        Element i is sample i: {"tokens": int32 [T+1], "mask": float32 [T]}.
        """

        def sample(sequence: SupportsIndex) -> Batch:
            one = self._packed.gather(np.array([int(sequence)]))
            return {name: value[0] for name, value in one.items()}

        return self._order(region, trainer).map(sample)

    def epoch_size(self, region: int, trainer: int = 0) -> int:
        """Return the number of samples of one pass over a stream's part of the shard."""
        first, last = self._range(region, trainer)
        return last - first

    def _sequences(self, region: int, start: int, count: int, trainer: int) -> np.ndarray:
        if start < 0 or count < 0:
            raise ValueError(f"start={start} and count={count} must not be negative")
        order = self._order(region, trainer)
        return np.array([order[i] for i in range(int(start), int(start) + count)], np.int64)

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
    ) -> tuple[list[int], list[int]]:
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
        return chosen, np.broadcast_to(start_R, (len(chosen),)).tolist()


def order_probe() -> str:
    """Return a few numbers of the order Grain draws: they change when a version draws another."""
    order = grain.MapDataset.range(97).shuffle(seed=12345).repeat()
    return " ".join(str(order[i]) for i in range(90, 120))
