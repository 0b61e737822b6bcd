"""Landing rules: what a region's parameters become when a payload lands. One rule a file.

In: the progress made while the payload travelled (local parameters minus their snapshot at the
send), as the updates of an Optax transform; the new anchor as `params`. Keywords: `displacement`
(new anchor minus snapshot), `staleness` (inner steps from send to landing), and `fragment`, `round`
and `step`. Out: what the loop adds to the new anchor. All arithmetic is fp32.
"""

from lowcomm_jax.landing.blend import blend
from lowcomm_jax.landing.replace import replace
from lowcomm_jax.landing.replay import replay
from lowcomm_jax.landing.taylor_delay_correction import TaylorState, taylor_delay_correction

__all__ = ["TaylorState", "blend", "replace", "replay", "taylor_delay_correction"]
