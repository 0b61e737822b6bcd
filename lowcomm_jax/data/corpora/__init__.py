"""Corpora: ordered documents with topics, by name."""

from lowcomm_jax.data.config import CORPORA
from lowcomm_jax.data.corpora.base import Corpus, CorpusSource, Document
from lowcomm_jax.data.corpora.columns import open_arrayrecord, open_hub, open_parquet
from lowcomm_jax.data.corpora.files import open_python, open_text
from lowcomm_jax.data.corpora.synthetic import MarkovCorpus, open_synthetic
from lowcomm_jax.refused import is_unknown

__all__ = ["Corpus", "CorpusSource", "Document", "MarkovCorpus", "open_corpus"]

_OPENERS = {
    "python": open_python,
    "text": open_text,
    "hf": open_hub,
    "parquet": open_parquet,
    "arrayrecord": open_arrayrecord,
    "synthetic": open_synthetic,
}


def open_corpus(source: CorpusSource) -> tuple[Corpus | None, list[str]]:
    """Return the corpus a spec names, or None and every violation, each with its fix."""
    if not isinstance(source.name, str):
        held = type(source.name).__name__
        fix = "write one like 'text:PATH'; for arrays of your own see docs/data.md"
        return None, [f"corpus is no string but {held}: {fix}"]
    opener = _OPENERS.get(source.kind)
    if opener is None:
        near = is_unknown(source.kind, CORPORA, "use one of")
        return None, [f"corpus={source.name!r} {near}"]
    return opener(source)
