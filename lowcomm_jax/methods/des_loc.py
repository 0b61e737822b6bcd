r"""DES-LOC (arXiv 2505.22549): parameters and both moments are averaged, each at its own pace.

.. math::
   \theta_r \leftarrow \tfrac1R \sum_q \theta_q \ \text{every } K_x, \qquad
   m_r \leftarrow \tfrac1R \sum_q m_q \ \text{every } K_u, \qquad
   v_r \leftarrow \tfrac1R \sum_q v_q \ \text{every } K_v

A moment with decay beta halves the weight of its past in ln 0.5 / ln beta steps, so that the second
moment may be averaged less often. There is no anchor: the model is the mean of the regions.

The inner optimizer's state must name its moments `mu` and `nu`. Use ADOPT, as the paper does, with
beta_1 = 0.95 and beta_2 = 0.9999 (`optax.contrib.adopt`; `configs/des_loc.py`): it divides a
gradient by the second moment, and averages the result. Adam divides the first moment. A region that
has seen no gradient of an entry would divide the first moment of the others by its own second one,
which is 0 until K_v. So the engine refuses Adam, unless K_u is a multiple of K_v.

Differs from the paper: ADOPT is that of Optax, which clips every entry of a normalised gradient to
the fourth root of the step; of the paper's own clipping we have no exact statement. Moments are
averaged after the step that used them, as in the code that we have read.
"""

from __future__ import annotations

from lowcomm_jax.channels import Channel
from lowcomm_jax.methods.base import Method
from lowcomm_jax.refused import at_least
from lowcomm_jax.schedule import Never


def des_loc(period: int, first: int | None = None, second: int | None = None) -> Method:
    """Average parameters every `period` steps, first moments every `first`, second every `second`.

    Args:
      period: K_x, inner steps between two averages of the parameters.
      first: K_u, of the first moments; default 3 K_x.
      second: K_v, of the second moments; default 6 K_x.
    """
    given = {"period": period, "first": first, "second": second}
    lines = {k: at_least(k, v, 1) for k, v in given.items() if v is not None or k == "period"}
    problems = tuple(line for line in lines.values() if line is not None)
    if problems:
        period, first, second = 1, 3, 6  # in their place, so that no line is told of the channels
    channels = (
        Channel("params", every=period),
        Channel("mu", source="mu", every=3 * period if first is None else first),
        Channel("nu", source="nu", every=6 * period if second is None else second),
    )
    return Method("des_loc", Never(), None, channels=channels, problems=problems)
