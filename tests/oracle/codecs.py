"""Codecs as the papers' formulas on whole arrays: what is chosen, and what receivers decode.

An array is seen as one matrix: a scalar is 1 x 1, a vector 1 x M, more axes are split in two where
rows + columns is smallest. `encode` gives the entries of that matrix (or of its cosine transform)
that travel; `decode` what they stand for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Message:
    """Entries that travel: `values` [N, M] as decoded, zero where `sent` [N, M] is False."""

    values: np.ndarray
    sent: np.ndarray


def as_matrix(x: np.ndarray) -> np.ndarray:
    """View an array as a matrix."""
    if x.ndim < 2:
        return x.reshape(1, -1)
    splits = [(math.prod(x.shape[:i]), math.prod(x.shape[i:])) for i in range(1, x.ndim)]
    return x.reshape(min(splits, key=lambda split: split[0] + split[1]))


def side(n: int, block: int) -> int:
    """Return the largest divisor of n that does not exceed `block`."""
    return max(d for d in range(1, min(n, block) + 1) if n % d == 0)


def cosine_basis(n: int) -> np.ndarray:
    """Return the orthonormal DCT-II: row i, cos(pi i (2 j + 1) / 2 n), scaled to length 1."""
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    rows = np.cos(np.pi * i * (2 * j + 1) / (2 * n))
    return rows / np.sqrt(np.sum(rows * rows, axis=1, keepdims=True))


def codebook(x: np.ndarray, bits: int, sigmas: float = 6.0) -> np.ndarray:
    """Replace every value by the mean of its bin: 2^bits bins, `sigmas` wide, around the mean."""
    flat, bins = x.reshape(-1), 2**bits
    step = sigmas * (flat.std(ddof=1) if flat.size > 1 else 0.0) / bins
    if step == 0:
        return x.copy()
    code = np.clip(np.floor((flat - flat.mean()) / step + bins / 2 + 0.5), 0, bins - 1)
    out = np.zeros_like(flat)
    for b in np.unique(code):
        out[code == b] = flat[code == b].mean()
    return out.reshape(x.shape)


@dataclass(frozen=True)
class Quantised:
    """All entries, each as the mean of its bin."""

    bits: int

    def encode(self, x: np.ndarray) -> Message:
        matrix = as_matrix(x)
        return Message(codebook(matrix, self.bits), np.ones(matrix.shape, bool))

    def decode(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        return values.reshape(like.shape)


@dataclass(frozen=True)
class TopK:
    """The k largest entries of every chunk; `bits` codes all that is kept of an array together."""

    k: int
    block: int = 64
    bits: int | None = None

    def encode(self, x: np.ndarray) -> Message:
        matrix = as_matrix(x)
        height, width = (side(n, self.block) for n in matrix.shape)
        values = np.zeros_like(matrix)
        sent = np.zeros(matrix.shape, bool)
        for rows in _pieces(matrix.shape[0], height):
            for columns in _pieces(matrix.shape[1], width):
                chunk = self.forward(matrix[rows, columns])
                order = np.argsort(-np.abs(chunk), axis=None)[: self.k]
                chosen = np.zeros(chunk.size, bool)
                chosen[order] = True
                chosen = chosen.reshape(chunk.shape)
                values[rows, columns] = np.where(chosen, chunk, 0)
                sent[rows, columns] = chosen
        if self.bits is not None:
            values[sent] = codebook(values[sent], self.bits)
        return Message(values, sent)

    def decode(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        height, width = (side(n, self.block) for n in values.shape)
        out = np.zeros_like(values)
        for rows in _pieces(values.shape[0], height):
            for columns in _pieces(values.shape[1], width):
                out[rows, columns] = self.backward(values[rows, columns])
        return out.reshape(like.shape)

    def forward(self, chunk: np.ndarray) -> np.ndarray:
        return chunk

    def backward(self, chunk: np.ndarray) -> np.ndarray:
        return chunk


class CosineTopK(TopK):
    """The k largest cosine coefficients of every chunk."""

    def forward(self, chunk):
        down, across = (cosine_basis(n) for n in chunk.shape)
        return (down @ chunk @ across.T).astype(chunk.dtype)

    def backward(self, chunk):
        down, across = (cosine_basis(n) for n in chunk.shape)
        return (down.T @ chunk @ across).astype(chunk.dtype)


def e3m0(x: np.ndarray) -> np.ndarray:
    """Round to 0 or to +- s 2^e, e = -2 ... 4, whichever is nearest; s = max |x| / 16."""
    scale = np.abs(x).max() / 16
    if scale == 0:
        return x.copy()
    levels = np.concatenate([[0.0], 2.0 ** np.arange(-2, 5)]) * scale
    nearest = levels[np.abs(np.abs(x)[..., None] - levels).argmin(axis=-1)]
    return np.asarray(np.sign(x) * nearest, x.dtype)


def _pieces(n: int, width: int) -> list[slice]:
    return [slice(start, start + width) for start in range(0, n, width)]


def mean_over_regions(codec, messages: Sequence[Message], weights, like) -> np.ndarray:
    """Return the weighted mean of what the messages decode to, in their order."""
    total = np.zeros_like(like)
    for message, weight in zip(messages, weights, strict=True):
        total = total + weight * codec.decode(message.values, like)
    return np.asarray(total / sum(weights), like.dtype)


def mean_encoded_again(parts: int):
    """Means of a two-shot reduction: row i is in slice i mod parts, and slices are coded anew.

    A matrix of fewer rows is one row, cut into a piece for every slice.
    """

    def mean(codec, messages: Sequence[Message], weights, like) -> np.ndarray:
        first = mean_over_regions(codec, messages, weights, like)
        rows = as_matrix(first)
        if len(rows) < parts:
            rows = rows.reshape(-1, 1)
            width = -(-len(rows) // parts)
            slices = [slice(s * width, (s + 1) * width) for s in range(parts)]
        else:
            slices = [slice(s, None, parts) for s in range(parts)]
        again = np.zeros_like(rows)
        for part in slices:
            own = rows[part]
            if own.size:
                again[part] = codec.encode(own).values.reshape(own.shape)
        return again.reshape(like.shape)

    return mean


def mean_over_senders(codec, messages: Sequence[Message], weights, like) -> np.ndarray:
    """Average every entry over the messages that hold it (0 where none does), then decode."""
    total, weight = np.zeros_like(messages[0].values), np.zeros_like(messages[0].values)
    for message, own in zip(messages, weights, strict=True):
        total = total + own * message.values
        weight = weight + own * message.sent
    mean = np.where(weight > 0, total / np.where(weight > 0, weight, 1), 0)
    return codec.decode(mean.astype(like.dtype), like)
