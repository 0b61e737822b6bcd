"""`DataConfig`: the description of a data pipeline, from corpus to shards."""

import dataclasses
import os
from pathlib import Path

from lowcomm_jax.refused import at_least, is_unknown, one_of

SHARDINGS = ("iid", "topic", "dirichlet")
PACKINGS = ("stream", "document")
CORPORA = (
    "python",
    "python:tests",
    "text:PATH",
    "hf:NAME[:CONFIG]",
    "parquet:GLOB",
    "arrayrecord:GLOB",
    "synthetic:NAME",
)
UNUSABLE = "the data config cannot be used"
TOKENIZERS = ("bytes", "bpe:VOCAB", "file:PATH")
HF_DEFAULT_LIMIT = 50_000
# 256 bytes, end of document, padding: below this a BPE vocabulary could not spell every text.
SMALLEST_BPE = 258
LARGEST_VOCABULARY = 1 << 31


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Describe a corpus, its tokens, its split and its shards.

    Everything a sample depends on is here: equal configs over an equal corpus give equal samples.

    Attributes:
        corpus: one of `CORPORA`. `python` reads the running interpreter's standard library.
        tokenizer: `bytes`, `bpe:VOCAB` (trained on the corpus, cached) or `file:PATH` (a
            `tokenizer.json`).
        seq_len: T, target tokens a sequence.
        seed: of the shards and of the order of samples.
        split_seed: seed of the train/validation split alone, so that runs with different `seed` are
            judged on the same validation documents.
        regions: number of disjoint shards of the training documents.
        trainers: disjoint parts of every region's shard. Trainer t reads part `t % trainers` in an
            order of its own, so with 1 all trainers of a region share its shard.
        sharding: `iid` (seeded shuffle, regions of equal token counts), `topic` (every topic lives
            in one region) or `dirichlet` (per topic, shares of the regions drawn from
            Dirichlet(alpha)).
        alpha: concentration of `dirichlet`; small is skewed, large is close to even.
        val_fraction: expected share of documents held out, common to all regions.
        packing: `stream` (documents joined by the end token and cut every T tokens) or `document`
            (no sequence holds two documents; the rest is padding with mask 0).
        cache_dir: where documents, tokenizers and tokens are kept; None = the user's cache folder.
        limit: number of documents read, from the first; None = all (`hf:` reads the first 50,000).
        text_column: column of `hf:` and `parquet:` that holds the text.
        topic_column: column that holds the topic; None = the file's stem (`parquet:`) or one topic.
        split: split of an `hf:` data set that is read.
        eos_token: end-of-document token of a `file:` tokenizer; None = found by its usual names.
    """

    corpus: str = "python"
    tokenizer: str = "bytes"
    seq_len: int = 128
    seed: int = 0
    split_seed: int = 0
    regions: int = 1
    trainers: int = 1
    sharding: str = "iid"
    alpha: float = 0.5
    val_fraction: float = 0.05
    packing: str = "stream"
    cache_dir: str | os.PathLike[str] | None = None
    limit: int | None = None
    text_column: str = "text"
    topic_column: str | None = None
    split: str = "train"
    eos_token: str | None = None

    def violations(self) -> list[str]:
        """Return every fault visible without reading the corpus, each with its fix."""
        sizes = ("seq_len", "regions", "trainers")
        found = [at_least(name, getattr(self, name), 1) for name in sizes]
        found += [
            f"{name}={getattr(self, name)} must be a non-negative integer below 2**63"
            for name in ("seed", "split_seed")
            if not 0 <= getattr(self, name) < 1 << 63
        ]
        if self.limit is not None and self.limit < 2:
            found.append(
                f"limit={self.limit} must be at least 2 (one document to train on, one to validate)"
                " or None for all"
            )
        found.append(one_of("sharding", self.sharding, SHARDINGS))
        if not self.alpha > 0:
            found.append(f"alpha={self.alpha} must be positive")
        if not 0 < self.val_fraction < 1:
            found.append(f"val_fraction={self.val_fraction} must lie strictly between 0 and 1")
        found.append(one_of("packing", self.packing, PACKINGS))
        return [x for x in found if x is not None] + _tokenizer_violations(self.tokenizer)


def _tokenizer_violations(name: str) -> list[str]:
    kind, _, rest = str(name).partition(":")
    if name == "bytes":
        return []
    if kind == "bpe":
        if rest.isdecimal() and SMALLEST_BPE <= int(rest) < LARGEST_VOCABULARY:
            return []
        return [f"tokenizer={name!r}: write bpe:N with N at least {SMALLEST_BPE}"]
    if kind == "file":
        if rest and Path(os.path.expanduser(rest)).is_file():
            return []
        return [f"tokenizer={name!r}: there is no such file; give the path of a tokenizer.json"]
    return [f"tokenizer={name!r} {is_unknown(name, TOKENIZERS, 'use one of')}"]
