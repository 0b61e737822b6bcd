"""A transformer cut into pipeline stages.

In: a `Model` with `layer_loop="scan"` and a mesh with a `stage` axis. Out: `Pipeline`, which offers
the loss and its gradients by one of two schedules, GPipe or 1F1B.

- `layout`: which parameters a stage holds; `one_f_one_b`: the 1F1B schedule (GPipe's is in
  `mesh.stages`); `pipeline`: the two put together.
"""

from lowcomm_jax.models.pipeline.pipeline import Pipeline, pipeline_problems, schedule_problems

__all__ = ["Pipeline", "pipeline_problems", "schedule_problems"]
