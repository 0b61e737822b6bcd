"""Text for training across regions: corpora, tokenizers, disjoint shards, samples by number.

In: a `DataConfig`. Out: `load` gives training data, held-out data and the tokenizer.

    train, evaluation, tokenizer = load(DataConfig(corpus="python", regions=4))
    batch = train.samples(start=0, count=8)     # {"tokens": [4, 8, T+1], "mask": [4, 8, T]}

Every sample is a pure function of (config, region, trainer, number). The caller keeps the
positions, so a resumed run reads the same samples.
"""

from lowcomm_jax.data.config import DataConfig
from lowcomm_jax.data.corpora import Corpus, Document, open_corpus
from lowcomm_jax.data.load import EvalData, load, per_document
from lowcomm_jax.data.tokenizers import Tokenizer
from lowcomm_jax.data.train import TrainData

__all__ = [
    "Corpus",
    "DataConfig",
    "Document",
    "EvalData",
    "Tokenizer",
    "TrainData",
    "load",
    "open_corpus",
    "per_document",
]
