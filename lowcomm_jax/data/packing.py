"""Sequences cut out of documents, with random access: sequence number -> tokens and mask.

`tokenise` puts the tokens of all documents on disk, each document followed by the end token. `pack`
cuts them into sequences.

The documents of a group (a region's shard, the validation set) follow one another, each with its
end token, and an end token is read before the first. `stream` cuts that row every T tokens.
Neighbouring sequences share one token, so that every token (end tokens included) is the target
exactly once. `document` does the same for every document by itself. The last sequence is shorter:
it is kept, filled with padding and masked, so that no token is dropped.

First-fit packing of whole documents is missing. Without separate attention per document, documents
of a sequence attend to one another just the same, and a plan of the whole epoch would be needed.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lowcomm_jax.data.cache import open_or_build
from lowcomm_jax.data.corpora.base import fingerprint_of
from lowcomm_jax.data.documents import Documents, Progress, counted
from lowcomm_jax.data.tokenizers import Tokenizer

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


def tokenise(
    documents: Documents, tokenizer: Tokenizer, cache: Path, progress: Progress | None = None
) -> Tokens:
    """Encode all documents into `cache`, or find them there by corpus and tokenizer digest."""
    name = f"tokens/{fingerprint_of(documents.digest, tokenizer.digest)[:32]}"
    dtype = np.uint16 if tokenizer.size <= 1 << 16 else np.uint32

    def build(folder: Path) -> None:
        _write(documents, tokenizer, dtype, folder, progress)

    path = open_or_build(cache, name, build)
    return Tokens(
        token_N=np.asarray(np.memmap(path / "token.bin", dtype, "r")),
        offset_E=np.load(path / "offset.npy"),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """W sequences over G groups of documents.

    Attributes:
        token_N: all tokens, as stored.
        document_M: number of each document in the row of all groups.
        begin_E: int64 [M + 1], where each document begins in that row, and the end.
        shift_M: int64, place in `token_N` minus place in the row.
        start_W: int64, place in the row of the first token of a sequence; -1 = the end token
            before the first document.
        stop_W: int64, place in the row at which padding begins.
        first_F: int64 [G + 1], first sequence of each group, and W.
        seq_len: T. eos_id, pad_id: of the tokenizer.
    """

    token_N: np.ndarray
    document_M: np.ndarray
    begin_E: np.ndarray
    shift_M: np.ndarray
    start_W: np.ndarray
    stop_W: np.ndarray
    first_F: np.ndarray
    seq_len: int
    eos_id: int
    pad_id: int

    def __len__(self) -> int:
        return len(self.start_W)

    def gather(self, sequence_n: np.ndarray) -> dict[str, np.ndarray]:
        """Return {"tokens": int32 [n, T+1], "mask": float32 [n, T]} of sequences by number."""
        place_nxT, inside_nxT, document_nxT = self._places(sequence_n)
        stored_nxT = np.maximum(place_nxT, 0) + self.shift_M[document_nxT]
        # Only padding and the token before the first document point outside: any place will do.
        stored_nxT = np.minimum(stored_nxT, len(self.token_N) - 1)
        tokens_nxT = self.token_N[stored_nxT].astype(np.int32)
        tokens_nxT[:, 0] = np.where(place_nxT[:, 0] < 0, self.eos_id, tokens_nxT[:, 0])
        tokens_nxT = np.where(inside_nxT, tokens_nxT, np.int32(self.pad_id))
        return {"tokens": tokens_nxT, "mask": inside_nxT[:, 1:].astype(np.float32)}

    def documents(self, sequence_n: np.ndarray) -> np.ndarray:
        """Return the document number of every target, int32 [n, T]; -1 where masked."""
        _, inside_nxT, document_nxT = self._places(sequence_n)
        number_nxT = self.document_M[document_nxT[:, 1:]]
        return np.where(inside_nxT[:, 1:], number_nxT, -1).astype(np.int32)

    def _places(self, sequence_n: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        place_nxT = self.start_W[sequence_n][:, None] + np.arange(self.seq_len + 1)[None]
        inside_nxT = place_nxT < self.stop_W[sequence_n][:, None]
        last = len(self.document_M) - 1
        ends_nx2 = np.searchsorted(self.begin_E, place_nxT[:, [0, -1]], side="right") - 1
        ends_nx2 = np.clip(ends_nx2, 0, last)
        document_nxT = np.repeat(ends_nx2[:, :1], self.seq_len + 1, axis=1)
        # Most sequences lie inside one document; only the others need a search for every token.
        mixed_n = ends_nx2[:, 0] != ends_nx2[:, 1]
        searched = np.searchsorted(self.begin_E, place_nxT[mixed_n], side="right") - 1
        document_nxT[mixed_n] = np.clip(searched, 0, last)
        return place_nxT, inside_nxT, document_nxT


def pack(
    tokens: Tokens,
    groups: Sequence[np.ndarray],
    seq_len: int,
    packing: str,
    eos_id: int,
    pad_id: int,
) -> Packed:
    """Cut the documents of each group, in the order given, into sequences of `seq_len` targets."""
    document_M = np.concatenate(groups)
    length_M = tokens.length_D[document_M]
    begin_E = np.concatenate([[0], np.cumsum(length_M)])
    group_of_M = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    if packing == "stream":
        # One piece a group: its documents joined.
        piece_group = np.arange(len(groups))
        size_P = np.bincount(group_of_M, weights=length_M, minlength=len(groups)).astype(np.int64)
    else:
        piece_group, size_P = group_of_M, length_M
    end_P = np.cumsum(size_P)
    count_P = -(-size_P // seq_len)
    piece_W = np.repeat(np.arange(len(size_P)), count_P)
    nth_W = np.arange(len(piece_W)) - np.repeat(np.cumsum(count_P) - count_P, count_P)
    per_group_G = np.bincount(piece_group, weights=count_P, minlength=len(groups))
    return Packed(
        token_N=tokens.token_N,
        document_M=document_M,
        begin_E=begin_E,
        shift_M=tokens.offset_E[document_M] - begin_E[:-1],
        start_W=(end_P - size_P)[piece_W] + nth_W * seq_len - 1,
        stop_W=end_P[piece_W],
        first_F=np.concatenate([[0], np.cumsum(per_group_G)]).astype(np.int64),
        seq_len=seq_len,
        eos_id=eos_id,
        pad_id=pad_id,
    )


# -- tokens on disk ----------------------------------------------------------------------------


def _write(
    documents: Documents,
    tokenizer: Tokenizer,
    dtype: type,
    folder: Path,
    progress: Progress | None,
) -> None:
    lengths = [0]
    with open(folder / "token.bin", "wb") as out:
        batches = counted(_batches(documents), "tokenizes", len(documents), progress, len)
        for texts in batches:
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
