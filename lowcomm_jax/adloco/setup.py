"""`AdaptiveSetup`: the settings of an `AdaptiveEngine` in one record."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from lowcomm_jax.adloco.learning_rate import LrSchedule, Scaling
from lowcomm_jax.settings import InConfig
from lowcomm_jax.setup import FROM_1_OR_NONE, FUNCTION_OR_NONE, Setup


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveSetup(Setup):
    """The settings of an `AdaptiveEngine`: those of an engine, and four that batches need."""

    adaptive: ClassVar[bool] = True

    _: dataclasses.KW_ONLY
    largest_microbatch: Annotated[
        int | None,
        InConfig("learnt", section="adaptive"),
        FROM_1_OR_NONE,
        "most samples of a microbatch, as many as fit into memory; None = the policy's largest "
        "batch.",
    ] = None
    reference_batch: Annotated[
        int | None,
        FROM_1_OR_NONE,
        "samples per region and step for which the learning rate of `inner`, its peak, and the "
        "network's seconds of a step were chosen; None = the policy's start.",
    ] = None
    scaling: Annotated[
        Scaling,
        InConfig("learnt", section="adaptive"),
        "how the learning rate grows with the batch over `reference_batch` (a config's `batch`): "
        "none, sqrt or linear.",
    ] = "none"
    schedule: Annotated[
        LrSchedule | None,
        FUNCTION_OR_NONE,
        "samples consumed by all trainers of all regions (a traced int32; multiply by the tokens "
        "of one) -> factor on the learning rate; None = 1.",
    ] = None
