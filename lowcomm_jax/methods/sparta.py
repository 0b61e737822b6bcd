r"""SPARTA (EXO, 2025): after every step, average a small random share of the parameters.

With S_t the entries selected for step t, about p of every tensor, and delay tau:

.. math::
   \theta_r[S_t] \leftarrow \tfrac1R \sum_q \theta_q(t)[S_t] \quad\text{at step } t + \tau

and with `landing="replay"`, the rule of LOSCAR-SGD (arXiv 2605.20866), which keeps what a region
has made meanwhile:

.. math::
   \theta_r[S_t] \leftarrow \tfrac1R \sum_q \theta_q(t)[S_t]
     + \big(\theta_r(t + \tau) - \theta_r(t)\big)[S_t] \quad\text{at step } t + \tau

Parameters travel, not gradients; the inner optimizer's moments stay as they are. Without `period`
there is no anchor: the model is the mean of the regions, and `Engine.finish` sets all regions to
it.

With `period` DiLoCo's outer step follows every H steps (`diloco`). Without a delay SPARTA leaves
the mean of the regions unchanged; it changes the mean pseudo-gradient only through the points at
which regions train. A region that adopts an anchor drops what SPARTA has in flight, which is older.

Differs from EXO's code, the only source (it has no paper):

- The entries come from a seed that all regions share; the code broadcasts a dense mask from rank 0.
- Of every round(1 / p) consecutive entries one is drawn; the code draws Bernoulli(p)
  (`lowcomm_jax.channels.selection`).
- What lands after a step lands before this step's values leave. The code, in the versions that had
  a delay, read the values first.
- In the code payloads in flight overwrote parts of a newer anchor.

LOSCAR-SGD is known from notes; the paper was not read. It sends every N steps, and here N = 1. Our
reading: an entry that is under way is not drawn again before it has landed, since two payloads
would add the same progress twice. A landing precedes the drawing of the same step. A draw on an
entry under way is an empty place in the payload, which costs its bytes.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import optax

from lowcomm_jax.channels import Channel, Partitioned, Sampled, Shuffled
from lowcomm_jax.methods.base import Method
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.refused import collect
from lowcomm_jax.rules.landing import replay
from lowcomm_jax.schedule import Never
from lowcomm_jax.settings import one_of

SELECTIONS = {"sampled": Sampled, "shuffled": Shuffled, "partitioned": Partitioned}
LANDINGS = {"mean": None, "replay": replay()}


def sparta(
    p: float = 0.005,
    selection: Literal["sampled", "shuffled", "partitioned"] = "sampled",
    delay: int = 0,
    period: int | None = None,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    landing: Literal["mean", "replay"] = "mean",
) -> Method:
    """Average a share p of the parameters after every step, and with `period` run DiLoCo too.

    Args:
      p: share of the entries, from 3.1e-05 (2^-15) to 0.5, realised as 1 / round(1 / p).
      selection: `sampled` anew at every step; `shuffled` once, so that every entry travels once in
        1 / p steps; `partitioned`, shuffled anew for every such cycle.
      delay: tau, inner steps from a send to its landing.
      period: H of DiLoCo, inner steps per round; None = no main exchange.
      outer: Optax transform of DiLoCo's mean pseudo-gradient; default Nesterov 0.7 / 0.9.
      codec: codec of the selected values, without state; None = fp32. DiLoCo's payloads stay dense.
      landing: after a delay `mean` drops what a region has made of the selected entries meanwhile,
        `replay` adds it to the mean.
    """
    unknown_selection = one_of(*SELECTIONS).problem("selection", selection)
    unknown_landing = one_of(*LANDINGS).problem("landing", landing)
    problems = [line for line in (unknown_selection, unknown_landing) if line is not None]
    if period is None and outer is not None:
        problems.append("outer: without period there is no outer step; give both or neither")
    plain = functools.partial(
        Channel,
        "sparta",
        selection=(Sampled if unknown_selection else SELECTIONS[selection])(p),
        delay=delay,
        landing=None if unknown_landing else LANDINGS[landing],
    )
    channels = (collect(problems, "codec: ", lambda: plain(codec=codec)) or plain(),)
    if period is None:
        return Method("sparta", Never(), None, channels=channels, problems=tuple(problems))
    return diloco(period, outer).named("sparta_diloco", problems, channels=channels)
