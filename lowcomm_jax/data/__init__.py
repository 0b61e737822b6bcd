"""Text for training across regions: corpora, tokenizers, disjoint shards, samples by number.

    train, evaluation, tokenizer = load(DataConfig(corpus="python", regions=4))
    batch = train.samples(region=2, start=0, count=8)     # {"tokens": [8, T+1], "mask": [8, T]}

Every sample is a pure function of (config, region, trainer, number); positions belong to the
caller.
"""

from lowcomm_jax.data.config import DataConfig
from lowcomm_jax.data.corpora import Corpus, Document, open_corpus
from lowcomm_jax.data.evaluate import EvalData, per_document
from lowcomm_jax.data.load import load
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
