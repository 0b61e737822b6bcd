r"""FedAdam (arXiv 2003.00295, Alg. 2) on the regions' mean pseudo-gradient: a method of your own.

.. math::
   m \leftarrow \beta_1 m + (1 - \beta_1) \bar\Delta, \quad
   v \leftarrow \beta_2 v + (1 - \beta_2) \bar\Delta^2, \quad
   \Theta \leftarrow \Theta - \eta \frac{\hat m}{\sqrt{\hat v} + \epsilon}

Differs from the paper: the moments start at zero and are corrected for it, as in Adam.

    python -m experiments train --config=examples/fed_adam.py --workdir=runs/fed_adam
"""

import optax
from ml_collections import ConfigDict

from experiments.config import base
from lowcomm_jax.methods import Method
from lowcomm_jax.schedule import Staggered


def fed_adam(
    period: int, learning_rate: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3
) -> Method:
    """Every `period` inner steps one step of Adam on the mean pseudo-gradient.

    Args:
      period: H, inner steps a round.
      learning_rate: eta, positive.
      b1, b2: Adam's decays of m and v, in [0, 1).
      eps: Adam's epsilon.
    """
    problems = []
    if learning_rate <= 0:
        problems.append(f"learning_rate={learning_rate}: give a rate > 0")
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        problems.append(f"b1={b1}, b2={b2}: give decays in [0, 1)")
    return Method(
        name="fed_adam",
        schedule=Staggered(period),
        outer=optax.adam(learning_rate, b1, b2, eps),
        problems=tuple(problems),
    )


def get_config() -> ConfigDict:
    """Give the config: every keyword of the factory can be overridden."""
    return base("examples.fed_adam:fed_adam", period=30)
