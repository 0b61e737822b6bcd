"""Builds training data, validation data and the tokenizer that a `DataConfig` describes."""

from __future__ import annotations

import numpy as np

from lowcomm_jax.data.cache import cache_folder
from lowcomm_jax.data.config import HF_DEFAULT_LIMIT, UNUSABLE, DataConfig
from lowcomm_jax.data.corpora import open_corpus
from lowcomm_jax.data.corpora.base import fingerprint_of
from lowcomm_jax.data.corpora.files import SECTION
from lowcomm_jax.data.documents import Documents, Progress, materialise
from lowcomm_jax.data.packing import Packed, Tokens, pack, tokenise
from lowcomm_jax.data.sharding import cut_evenly, shard, shuffled, validation_mask
from lowcomm_jax.data.tokenizers import Tokenizer, open_tokenizer
from lowcomm_jax.data.train import TrainData, order_probe
from lowcomm_jax.refused import refuse

Batch = dict[str, np.ndarray]


def load(
    spec: DataConfig, *, progress: Progress | None = None
) -> tuple[TrainData, EvalData, Tokenizer]:
    """Read a corpus and return its training data, its validation data and the tokenizer.

    Documents, trained tokenizers and tokens are kept in `spec.cache_dir`, so that only the first
    start reads the corpus. Nothing is dropped but documents of white space, and files that are not
    UTF-8; the summary counts both, and names the files. Every other document trains exactly one
    region and trainer part, or validates.

    Args:
        spec: what is read.
        progress: called a few times a second at most, for what is not in the cache: with what is
            done with documents, how many are done, and of how many (None = not known).

    Raises:
        ValueError: the config cannot be used; lists all violations, each with its fix.
    """
    corpus, found = open_corpus(spec)
    refuse(UNUSABLE, spec.violations() + found)
    assert corpus is not None  # open_corpus gives a corpus or a violation
    cache = cache_folder(spec.cache_dir)
    limit = HF_DEFAULT_LIMIT if spec.limit is None and spec.corpus.startswith("hf:") else spec.limit
    documents = materialise(corpus, limit, cache, progress)
    tokenizer = open_tokenizer(spec.tokenizer, documents, cache, spec.eos_token, progress)
    tokens = tokenise(documents, tokenizer, cache, progress)
    validation_D = validation_mask(documents.key_D, spec.val_fraction, spec.split_seed)
    groups = _groups(spec, documents, tokens, validation_D)
    held_out = shuffled(np.flatnonzero(validation_D), documents.key_D, "eval", spec.split_seed)
    cut = (spec.seq_len, spec.packing, tokenizer.eos_id, tokenizer.pad_id)
    train = TrainData(
        pack(tokens, groups, *cut),
        seed=spec.seed,
        regions=spec.regions,
        trainers=spec.trainers,
        identity=_identity(spec, documents, tokenizer, groups),
        summary=_summary(spec, documents, tokens, tokenizer, groups, held_out),
    )
    return train, EvalData(pack(tokens, [held_out], *cut)), tokenizer


def _groups(
    spec: DataConfig, documents: Documents, tokens: Tokens, validation_D: np.ndarray
) -> list[np.ndarray]:
    """Return the document numbers of (region 0, part 0), (region 0, part 1), ..., in order."""
    training_N = np.flatnonzero(~validation_D)
    if not len(training_N) or not validation_D.any():
        cut = (
            f"; a folder has one a file, a single file is cut at blank lines, {SECTION} characters "
            "apart or more"
        )
        refuse(
            UNUSABLE,
            [
                f"corpus={spec.corpus!r} has {len(np.unique(documents.key_D))} different "
                "document(s); two are needed, one to train on and one to validate"
                f"{cut if spec.corpus.startswith('text:') else ''}"
            ],
        )
    key_D, length_D = documents.key_D, tokens.length_D
    shards, found = shard(
        spec.sharding,
        training_N,
        key_D,
        documents.topic_D,
        length_D,
        spec.regions,
        spec.alpha,
        spec.seed,
    )
    found += [
        f"trainers={spec.trainers} but region {region} has only {len(rows)} training documents; "
        "lower trainers or regions"
        for region, rows in enumerate(shards)
        if len(rows) < spec.trainers
    ]
    refuse(UNUSABLE, found)
    groups = []
    for region, rows in enumerate(shards):
        # A fresh order, so that the row of documents differs from that of other region counts.
        row_N = shuffled(rows, key_D, "row", spec.seed, region)
        part_N = cut_evenly(length_D[row_N], spec.trainers)
        groups += [row_N[part_N == part] for part in range(spec.trainers)]
    return groups


def _identity(
    spec: DataConfig, documents: Documents, tokenizer: Tokenizer, groups: list[np.ndarray]
) -> str:
    # The shards as they came out, not the fields they were drawn from: a library that draws other
    # numbers from the same seed changes the identity too.
    shards = [documents.key_D[rows].tobytes().hex() for rows in groups]
    cut = (spec.seq_len, spec.packing, spec.seed, spec.regions, spec.trainers)
    return fingerprint_of(documents.digest, tokenizer.digest, *cut, order_probe(), *shards)


def _summary(
    spec: DataConfig,
    documents: Documents,
    tokens: Tokens,
    tokenizer: Tokenizer,
    groups: list[np.ndarray],
    held_out: np.ndarray,
) -> dict:
    """What `load` found, for the header of metrics.jsonl: counts, digests, tokens by region."""
    length_D = tokens.length_D
    by_region = [
        np.concatenate(groups[r * spec.trainers : (r + 1) * spec.trainers])
        for r in range(spec.regions)
    ]
    topics_RxK = [
        np.bincount(
            documents.topic_D[rows], weights=length_D[rows], minlength=len(documents.topics)
        )
        for rows in by_region
    ]
    return {
        "corpus": documents.corpus,
        "corpus_digest": documents.digest,
        "documents": len(documents),
        "blank_documents_dropped": documents.blank,
        "unreadable_left_out": documents.unreadable,
        "unreadable_names": list(documents.unreadable_names),
        "bytes": len(documents.text_N),
        "tokenizer": tokenizer.name,
        "tokenizer_digest": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "tokens": int(tokens.offset_E[-1]),
        "validation_documents": len(held_out),
        "validation_tokens": int(length_D[held_out].sum()),
        "region_documents": [len(rows) for rows in by_region],
        "region_tokens": [int(length_D[rows].sum()) for rows in by_region],
        "topics": list(documents.topics),
        "region_topic_tokens": [row.astype(np.int64).tolist() for row in topics_RxK],
    }


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
        if batch < 1 or (limit is not None and limit < 1):
            raise ValueError(f"batch={batch} and limit={limit} must be at least 1")
        count = -(-len(self) // batch)
        starts = range(0, (count if limit is None else min(count, limit)) * batch, batch)
        steps = [self._batch(start, batch) for start in starts]
        return {name: np.stack([step[name] for step in steps]) for name in steps[0]}

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
