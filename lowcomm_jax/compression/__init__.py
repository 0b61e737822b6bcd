"""Codecs: how pseudo-gradients are encoded for the way between regions. One codec a file.

In: a tree of fp32 arrays, a region's pseudo-gradient of one fragment, and the codec's state. Out: a
payload, whose arrays have the size that travels, the new state, and the decoded values (`Codec`).
`make` builds a codec from a name or a mapping. A codec of one leaf is a `MatrixCodec`; `PerTensor`
gives each leaf its own; `ErrorFeedback`, `EF21`, `DecoupledMomentum` and `CodecLevels` wrap codecs.
`Sliced` and `Staged` encode slices and pipeline stages. `windows` and `row_sharding` let each
device of a region encode its own part of a sharded leaf.
"""

from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.cast import Cast
from lowcomm_jax.compression.codebook import Statistical
from lowcomm_jax.compression.codec_levels import CodecLevels
from lowcomm_jax.compression.dct_top_k import DCTTopK
from lowcomm_jax.compression.decoupled_momentum import (
    DecoupledMomentum,
    DecoupledMomentumState,
    decoupled_momentum,
)
from lowcomm_jax.compression.e3m0 import E3M0
from lowcomm_jax.compression.ef21 import EF21, EF21State, ef21, integrate, integrates
from lowcomm_jax.compression.error_feedback import ErrorFeedback, ErrorFeedbackState, error_feedback
from lowcomm_jax.compression.integer import Integer
from lowcomm_jax.compression.low_rank import LowRank
from lowcomm_jax.compression.matrix import MatrixCodec
from lowcomm_jax.compression.optax_view import CompressState, compress
from lowcomm_jax.compression.random_k import RandomK
from lowcomm_jax.compression.registry import make, make_matrix, names
from lowcomm_jax.compression.rules import PRESETS, PerTensor
from lowcomm_jax.compression.sign import Sign
from lowcomm_jax.compression.staged import Staged
from lowcomm_jax.compression.top_k import TopK
from lowcomm_jax.compression.two_shot import Route, Sliced, route

__all__ = [
    "E3M0",
    "EF21",
    "PRESETS",
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
    "LowRank",
    "MatrixCodec",
    "PerTensor",
    "RandomK",
    "Route",
    "Sign",
    "Sliced",
    "Staged",
    "Statistical",
    "TopK",
    "compress",
    "decoupled_momentum",
    "ef21",
    "error_feedback",
    "integrate",
    "integrates",
    "make",
    "make_matrix",
    "names",
    "route",
]
