"""Corpora: ordered documents with topics, by name."""

from lowcomm_jax.data.config import CORPORA, DataConfig
from lowcomm_jax.data.corpora.base import Corpus, Document
from lowcomm_jax.data.corpora.columns import open_arrayrecord, open_hub, open_parquet
from lowcomm_jax.data.corpora.files import open_python, open_text
from lowcomm_jax.data.corpora.synthetic import MarkovCorpus, open_synthetic
from lowcomm_jax.refused import is_unknown

__all__ = ["Corpus", "Document", "MarkovCorpus", "open_corpus"]

_OPENERS = {
    "python": open_python,
    "text": open_text,
    "hf": open_hub,
    "parquet": open_parquet,
    "arrayrecord": open_arrayrecord,
    "synthetic": open_synthetic,
}


def open_corpus(spec: DataConfig) -> tuple[Corpus | None, list[str]]:
    """Return the corpus that a config names, or None and every violation, each with its fix."""
    if not isinstance(spec.corpus, str):
        held = type(spec.corpus).__name__
        fix = "write one like 'text:PATH'; for arrays of your own see docs/data.md"
        return None, [f"corpus is no string but {held}: {fix}"]
    kind, _, rest = spec.corpus.partition(":")
    if kind not in _OPENERS:
        return None, [f"corpus={spec.corpus!r} {is_unknown(kind, CORPORA, 'use one of')}"]
    return _OPENERS[kind](spec, rest)
