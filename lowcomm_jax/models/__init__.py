"""A decoder-only transformer in Flax NNX, offered as pure functions over a dict of parameters.

In: a `TransformerConfig` or a preset's name. Out: `build` gives a `Model` (initial parameters,
logits, loss, shardings, generation); `Pipeline` is the same model cut into pipeline stages. Nothing
in the engine needs this room: any loss over any pytree will do. Commands train whatever follows
`Trainable`.

- `protocol`: what a model is to a run, the decoder as well as one of your own;
- `config`, `presets`: the shape; `model`, `loss`: the functions; `transformer`, `attention`,
  `operations`: the layers;
- `sharding`: parameters over the devices of a region; `weights`: LLaMA checkpoints;
- `pipeline/`: stages and their two schedules.
"""

from lowcomm_jax.models.config import TransformerConfig
from lowcomm_jax.models.model import Model, build
from lowcomm_jax.models.pipeline.pipeline import Pipeline
from lowcomm_jax.models.presets import PRESETS, preset
from lowcomm_jax.models.protocol import Trainable

__all__ = ["PRESETS", "Model", "Pipeline", "Trainable", "TransformerConfig", "build", "preset"]
