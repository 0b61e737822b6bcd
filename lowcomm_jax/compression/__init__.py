"""Codecs: how pseudo-gradients are encoded for the way between regions.

In: a tree of fp32 arrays, a region's pseudo-gradient of one fragment, and the codec's state. Out: a
payload, whose arrays have the size that travels, the new state, and the decoded values (`Codec`).
`make` builds a codec from a name or a mapping. A codec of one leaf (`codecs`, one a file) codes the
units of a grid (`UnitCodec`). `PerTensor` gives each leaf its own, and places its units on the
devices of a region (`placement`). `ErrorFeedback`, `EF21`, `DecoupledMomentum` and `CodecLevels`
wrap codecs.
"""

from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.codec_levels import CodecLevels
from lowcomm_jax.compression.codecs.bf16_gate import BF16Gate
from lowcomm_jax.compression.codecs.cast import Cast
from lowcomm_jax.compression.codecs.codebook import Statistical
from lowcomm_jax.compression.codecs.dct_top_k import DCTTopK
from lowcomm_jax.compression.codecs.e3m0 import E3M0
from lowcomm_jax.compression.codecs.integer import Integer
from lowcomm_jax.compression.codecs.low_rank import LowRank
from lowcomm_jax.compression.codecs.random_k import RandomK
from lowcomm_jax.compression.codecs.sign import Sign
from lowcomm_jax.compression.codecs.top_k import TopK
from lowcomm_jax.compression.decoupled_momentum import (
    DecoupledMomentum,
    DecoupledMomentumState,
    decoupled_momentum,
)
from lowcomm_jax.compression.ef21 import EF21, EF21State, ef21, integrate, integrates
from lowcomm_jax.compression.error_feedback import ErrorFeedback, ErrorFeedbackState, error_feedback
from lowcomm_jax.compression.leaf import LeafCodec
from lowcomm_jax.compression.optax_view import CompressState, compress
from lowcomm_jax.compression.registry import make, make_leaf, names
from lowcomm_jax.compression.rules import PRESETS, PerTensor
from lowcomm_jax.compression.two_shot import Route, route
from lowcomm_jax.compression.units import Matrix, UnitCodec

__all__ = [
    "E3M0",
    "EF21",
    "PRESETS",
    "BF16Gate",
    "Cast",
    "Codec",
    "CodecLevels",
    "CompressState",
    "DCTTopK",
    "DecoupledMomentum",
    "DecoupledMomentumState",
    "EF21State",
    "ErrorFeedback",
    "ErrorFeedbackState",
    "Integer",
    "LeafCodec",
    "LowRank",
    "Matrix",
    "PerTensor",
    "RandomK",
    "Route",
    "Sign",
    "Statistical",
    "TopK",
    "UnitCodec",
    "compress",
    "decoupled_momentum",
    "ef21",
    "error_feedback",
    "integrate",
    "integrates",
    "make",
    "make_leaf",
    "names",
    "route",
]
