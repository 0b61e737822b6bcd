"""A decoder-only transformer in Flax NNX, offered as pure functions over a dict of parameters."""

from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.models.model import Model, build
from lowcomm_jax.models.pipeline.pipeline import Pipeline
from lowcomm_jax.models.presets import PRESETS, preset

__all__ = ["PRESETS", "Model", "Pipeline", "TransformerConfig", "build", "preset"]
