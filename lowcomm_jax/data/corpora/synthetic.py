"""Generated text of known entropy, equal on every machine and in every version.

A document is a walk of a first-order Markov chain over symbols; every topic has a chain of its own.
All randomness is SplitMix64 in integer arithmetic, so the text depends on no library's random
generator, and its digest is fixed.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from lowcomm_jax.data.config import DataConfig
from lowcomm_jax.data.corpora.base import Document, fingerprint_of
from lowcomm_jax.data.mixing import splitmix64

_TOTAL = 1 << 16


@dataclasses.dataclass(frozen=True)
class MarkovCorpus:
    """Documents of equal length in symbols, from one Markov chain a topic.

    Attributes:
        symbols: S different texts, none the beginning of another, so that a text has one reading.
        topics: K.
        documents_per_topic: documents of each topic.
        length: symbols a document.
        sharpness: the larger, the fewer likely successors a symbol has.
    """

    name: str
    symbols: tuple[str, ...]
    topics: int
    documents_per_topic: int
    length: int
    sharpness: int

    def fingerprint(self) -> str:
        return fingerprint_of("markov", *dataclasses.astuple(self))

    def transitions(self) -> np.ndarray:
        """Return the transition weights [K, S, S], int64; every row sums to 2**16."""
        size = len(self.symbols)
        counter = np.arange(self.topics * size * size, dtype=np.uint64)
        draw = (splitmix64(counter) >> np.uint64(48)).astype(np.int64).reshape(-1, size, size)
        # A power of a uniform draw leaves a few likely successors.
        raw = draw
        for _ in range(self.sharpness - 1):
            raw = raw * draw >> 16
        raw[..., 0] += 1  # a row of zeros cannot be divided
        # Every successor keeps at least one part in 2**16.
        weight = raw * (_TOTAL - size) // raw.sum(-1, keepdims=True) + 1
        # What integer division left over goes to the likeliest successor.
        rest = _TOTAL - weight.sum(-1)
        topic, row = np.indices(rest.shape)
        weight[topic, row, weight.argmax(-1)] += rest
        return weight

    def documents(self) -> Iterator[Document]:
        bound_KxSxS = np.cumsum(self.transitions(), axis=-1)
        topic_D = np.tile(np.arange(self.topics), self.documents_per_topic)
        count = len(topic_D)
        # The transition tables used the counters below 2**32.
        first = np.uint64(1 << 32)
        walk = np.arange((self.length + 1) * count, dtype=np.uint64).reshape(-1, count)
        draw_LxD = (splitmix64(first + walk) >> np.uint64(48)).astype(np.int64)
        state_D = draw_LxD[self.length] % len(self.symbols)
        path_LxD = np.empty((self.length, count), np.int64)
        for step in range(self.length):
            path_LxD[step] = state_D
            state_D = (bound_KxSxS[topic_D, state_D] <= draw_LxD[step][:, None]).sum(-1)
        for topic, path_L in zip(topic_D, path_LxD.T, strict=True):
            yield Document("".join(self.symbols[s] for s in path_L), f"topic{topic}")


def _words() -> tuple[str, ...]:
    onsets, vowels = "bdfgklmnprstvz", "aeiou"
    syllables = [onset + vowel for onset in onsets for vowel in vowels]
    # A word is one to three syllables; the space that ends it makes the reading unique.
    chosen = splitmix64(np.arange(1 << 40, (1 << 40) + 400, dtype=np.uint64))
    words: dict[str, None] = {}
    for value in chosen.tolist():
        parts = [syllables[(value >> (8 * k)) % len(syllables)] for k in range(value % 3 + 1)]
        words["".join(parts) + " "] = None
    return tuple(words)[:64]


def open_synthetic(spec: DataConfig, rest: str) -> tuple[MarkovCorpus | None, list[str]]:
    """Return a generated corpus by name, or the spec's violations.

    `synthetic:letters`: 27 letters (a to z and space), 8 topics, 512 documents of 1,024 characters.
    `synthetic:words`: 64 words of one to three syllables, 8 topics, 512 documents of 256 words.
    """
    known = {
        "letters": MarkovCorpus(
            "synthetic:letters", tuple("abcdefghijklmnopqrstuvwxyz "), 8, 64, 1024, 8
        ),
        "words": MarkovCorpus("synthetic:words", _words(), 8, 64, 256, 8),
    }
    if rest in known:
        return known[rest], []
    return None, [f"corpus={spec.corpus!r}: write synthetic:letters or synthetic:words"]
