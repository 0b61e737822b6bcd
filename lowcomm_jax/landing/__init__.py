"""Landing rules: Optax transforms of the progress made while a payload travelled."""

from lowcomm_jax.landing.blend import blend
from lowcomm_jax.landing.replace import replace
from lowcomm_jax.landing.replay import replay
from lowcomm_jax.landing.taylor_delay_correction import TaylorState, taylor_delay_correction

__all__ = ["TaylorState", "blend", "replace", "replay", "taylor_delay_correction"]
