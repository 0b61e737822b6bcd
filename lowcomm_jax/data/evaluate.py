"""Validation batches, the same at every call, with the document of every target."""

from collections.abc import Iterator

import numpy as np

from lowcomm_jax.data.packing import Packed

Batch = dict[str, np.ndarray]


class EvalData:
    """The validation sequences, common to all regions.

    Documents stand in an order drawn from the split seed, so that the first n sequences are those
    of documents chosen at random. Every token of the validation documents is a target once.

    Attributes:
        seq_len: T.
        documents: number of validation documents.
        targets: tokens predicted in all.
    """

    def __init__(self, packed: Packed):
        self.seq_len: int = packed.seq_len
        self.documents: int = len(packed.document_M)
        self.targets: int = int(packed.begin_E[-1])
        self._packed = packed

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._packed)

    def batches(self, batch: int, limit: int | None = None) -> Batch:
        """Return the first `limit` batches (None = all) as arrays.

        Args:
            batch: B. The last batch is filled up with sequences of padding, mask 0, document -1.
            limit: n, or fewer where there are fewer.

        Returns:
            {"tokens": int32 [n, B, T+1], "mask": float32 [n, B, T], "document": int32 [n, B, T]},
            document = number of the target's document in the corpus.

        Raises:
            ValueError: batch or limit below 1.
        """
        steps = list(self.iterate(batch, limit))
        return {name: np.stack([step[name] for step in steps]) for name in steps[0]}

    def iterate(self, batch: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield the batches of `batches` one by one, each gathered when asked for: leaves [B, ...].

        Raises:
            ValueError: batch or limit below 1.
        """
        if batch < 1 or (limit is not None and limit < 1):
            raise ValueError(f"batch={batch} and limit={limit} must be at least 1")
        count = -(-len(self) // batch)
        starts = range(0, (count if limit is None else min(count, limit)) * batch, batch)
        return (self._batch(start, batch) for start in starts)

    def _batch(self, start: int, batch: int) -> Batch:
        number = np.arange(start, min(start + batch, len(self)))
        arrays = self._packed.gather(number)
        arrays["document"] = self._packed.documents(number)
        short = ((0, batch - len(number)), (0, 0))
        fill = {"tokens": self._packed.pad_id, "mask": 0, "document": -1}
        return {
            name: np.pad(value, short, constant_values=fill[name]) for name, value in arrays.items()
        }


def per_document(values: np.ndarray, document: np.ndarray) -> Batch:
    """Add up a value of every target by document, as intervals over documents need.

    Args:
        values: float, any shape: the loss of each target.
        document: int32, same shape: the document of each target, -1 = masked.

    Returns:
        {"document": int64 [D], "sum": float64 [D], "count": int64 [D]} of the documents present.

    Raises:
        ValueError: the shapes differ.
    """
    if values.shape != document.shape:
        raise ValueError(f"values {values.shape} and document {document.shape} differ in shape")
    kept = document >= 0
    present, place = np.unique(document[kept], return_inverse=True)
    weights = np.asarray(values[kept], np.float64)
    return {
        "document": present.astype(np.int64),
        "sum": np.bincount(place, weights=weights, minlength=len(present)),
        "count": np.bincount(place, minlength=len(present)),
    }
