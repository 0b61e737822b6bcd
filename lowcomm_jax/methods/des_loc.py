r"""DES-LOC (arXiv 2505.22549): parameters and both Adam moments are averaged, each at its own pace.

.. math::
   \theta_r \leftarrow \tfrac1R \sum_q \theta_q \ \text{every } K_x, \qquad
   m_r \leftarrow \tfrac1R \sum_q m_q \ \text{every } K_u, \qquad
   v_r \leftarrow \tfrac1R \sum_q v_q \ \text{every } K_v

====== ======================================== =======================
symbol meaning                                  argument
====== ======================================== =======================
K_x    steps between averages of parameters     `period`
K_u    of the first moment                      `first` (3 K_x)
K_v    of the second moment                     `second` (6 K_x)
====== ======================================== =======================

A moment with decay beta halves the weight of its past in ln 0.5 / ln beta steps, so that the second
moment may be averaged less often. There is no anchor: the model is the mean of the regions.

The inner optimizer's state must name its moments `mu` and `nu`, as that of AdamW does.

Differs from the paper: its ADOPT optimizer and its clipping of every gradient entry are missing,
since we have no exact statement of them. Its settings are beta_1 = 0.95, beta_2 = 0.9999. Moments
are averaged after the step that used them, as in the code that we have read.
"""

from __future__ import annotations

from lowcomm_jax.channels import Channel
from lowcomm_jax.methods.base import Method
from lowcomm_jax.schedule import Never


def des_loc(period: int, first: int | None = None, second: int | None = None) -> Method:
    """Average parameters every `period` steps, first moments every `first`, second every `second`.

    Args:
      period: K_x, inner steps between two averages of the parameters.
      first: K_u, of the first moments; default 3 K_x.
      second: K_v, of the second moments; default 6 K_x.
    """
    channels = (
        Channel("params", every=period),
        Channel("mu", source="mu", every=3 * period if first is None else first),
        Channel("nu", source="nu", every=6 * period if second is None else second),
    )
    return Method("des_loc", Never(), None, channels=channels)
