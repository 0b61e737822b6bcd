"""`DataConfig`: the description of a data pipeline, from corpus to shards."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Literal

from lowcomm_jax.refused import is_unknown, is_whole
from lowcomm_jax.settings import FROM_1, Takes, described, misfits, number

Sharding = Literal["iid", "topic", "dirichlet"]
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


_SEED = Takes(
    lambda x: is_whole(x) and 0 <= x < 1 << 63, "must be a non-negative integer below 2**63"
)
_LIMIT = Takes(
    lambda x: x is None or (is_whole(x) and x >= 2),
    "must be at least 2 (one document to train on, one to validate) or None for all",
)


@described
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Describe a corpus, its tokens, its split and its shards.

    Everything a sample depends on is here: equal configs over an equal corpus give equal samples.
    """

    corpus: Annotated[
        str,
        f"one of {', '.join(CORPORA)}; `python` reads the running interpreter's standard library.",
    ] = "python"
    tokenizer: Annotated[
        str,
        "`bytes`, `bpe:VOCAB` (trained on the corpus, cached) or `file:PATH` (a `tokenizer.json`).",
    ] = "bytes"
    seq_len: Annotated[int, FROM_1, "T, target tokens a sequence."] = 128
    seed: Annotated[int, _SEED, "of the shards and of the order of samples."] = 0
    split_seed: Annotated[
        int,
        _SEED,
        "seed of the train/validation split alone, so that runs with different `seed` are judged "
        "on the same validation documents.",
    ] = 0
    regions: Annotated[int, FROM_1, "number of disjoint shards of the training documents."] = 1
    trainers: Annotated[
        int,
        FROM_1,
        "disjoint parts of every region's shard. Trainer t reads part `t % trainers` in an order "
        "of its own, so with 1 all trainers of a region share its shard.",
    ] = 1
    sharding: Annotated[
        Sharding,
        "`iid` (seeded shuffle, regions of equal token counts), `topic` (every topic lives in one "
        "region) or `dirichlet` (per topic, shares of the regions drawn from Dirichlet(alpha)).",
    ] = "iid"
    alpha: Annotated[
        float,
        number(lambda x: x > 0, "must be positive"),
        "concentration of `dirichlet`; small is skewed, large is close to even.",
    ] = 0.5
    val_fraction: Annotated[
        float,
        number(lambda x: 0 < x < 1, "must lie strictly between 0 and 1"),
        "expected share of documents held out, common to all regions.",
    ] = 0.05
    packing: Annotated[
        Literal["stream", "document"],
        "`stream` (documents joined by the end token and cut every T tokens) or `document` (no "
        "sequence holds two documents; the rest is padding with mask 0).",
    ] = "stream"
    cache_dir: Annotated[
        str | os.PathLike[str] | None,
        "where documents, tokenizers and tokens are kept; None = the user's cache folder.",
    ] = None
    limit: Annotated[
        int | None,
        _LIMIT,
        "number of documents read, from the first; None = all (`hf:` reads the first 50,000).",
    ] = None
    text_column: Annotated[str, "column of `hf:` and `parquet:` that holds the text."] = "text"
    topic_column: Annotated[
        str | None,
        "column that holds the topic; None = the file's stem (`parquet:`) or one topic.",
    ] = None
    split: Annotated[str, "split of an `hf:` data set that is read."] = "train"
    eos_token: Annotated[
        str | None,
        "end-of-document token of a `file:` tokenizer; None = found by its usual names.",
    ] = None

    def violations(self) -> list[str]:
        """Return every fault visible without reading the corpus, each with its fix."""
        found = [problem.text for problem in misfits(self)]
        return found + _tokenizer_violations(self.tokenizer)


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
