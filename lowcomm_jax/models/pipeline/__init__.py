"""A transformer cut into pipeline stages: its layout, its two schedules, its train step."""

from lowcomm_jax.models.pipeline.pipeline import Pipeline, pipeline_problems, schedule_problems

__all__ = ["Pipeline", "pipeline_problems", "schedule_problems"]
