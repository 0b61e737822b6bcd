"""The tokens of all documents on disk, each document followed by the end token."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lowcomm_jax.data.cache import open_or_build
from lowcomm_jax.data.corpora.base import fingerprint_of
from lowcomm_jax.data.documents import Documents
from lowcomm_jax.data.tokenizers import Tokenizer

_FORMAT = 1
_BATCH_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Token numbers of D documents, memory-mapped.

    Attributes:
        token_N: uint16 or uint32; document d with its end token is [offset_E[d], offset_E[d + 1]).
        offset_E: int64 [D + 1].
    """

    token_N: np.ndarray
    offset_E: np.ndarray

    @property
    def length_D(self) -> np.ndarray:
        """Tokens of each document, its end token included."""
        return np.diff(self.offset_E)


def tokenise(documents: Documents, tokenizer: Tokenizer, cache: Path) -> Tokens:
    """Encode all documents into `cache`, or find them there by corpus and tokenizer digest."""
    path = cache / "tokens" / fingerprint_of(_FORMAT, documents.digest, tokenizer.digest)[:32]
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32
    open_or_build(path, lambda folder: _write(documents, tokenizer, dtype, folder))
    return Tokens(
        token_N=np.asarray(np.memmap(path / "token.bin", dtype, "r")),
        offset_E=np.load(path / "offset.npy"),
    )


def _write(documents: Documents, tokenizer: Tokenizer, dtype: type, folder: Path) -> None:
    lengths = [0]
    with open(folder / "token.bin", "wb") as out:
        for texts in _batches(documents):
            for tokens in tokenizer.encode_batch(texts):
                out.write(tokens.astype(dtype).tobytes())
                out.write(dtype(tokenizer.eos_id).tobytes())
                lengths.append(len(tokens) + 1)
    np.save(folder / "offset.npy", np.cumsum(lengths, dtype=np.int64))


def _batches(documents: Documents) -> Iterator[list[str]]:
    texts, size = [], 0
    for text in documents.texts():
        texts.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield texts
            texts, size = [], 0
    yield texts
