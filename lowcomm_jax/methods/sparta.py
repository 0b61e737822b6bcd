r"""SPARTA (EXO, 2025): after every step, average a small random share of the parameters.

With S_t the entries selected for step t, about p of every tensor, and delay tau:

.. math::
   \theta_r[S_t] \leftarrow \tfrac1R \sum_q \theta_q(t)[S_t] \quad\text{at step } t + \tau

====== ======================================================= ===========
symbol meaning                                                 argument
====== ======================================================= ===========
p      share of the entries that travel at a step              `p`
tau    steps from send to landing                              `delay`
H      steps between outer steps of SPARTA with DiLoCo          `period`
====== ======================================================= ===========

Parameters travel, not gradients; the inner optimizer's moments stay as they are. Without `period`
there is no anchor: the model is the mean of the regions, at which `Engine.finish` lets all end.

With `period` DiLoCo's outer step follows, every H steps (`methods.diloco`). Its pseudo-gradient
Delta_r = Theta - theta_r is what it always is. Without a delay SPARTA moves no mean of the regions,
and so changes the mean pseudo-gradient only by where the regions have trained. An anchor that a
region adopts is newer than what SPARTA has in flight, which then does not land there.

Differs from EXO's code, the only source (it has no paper): the entries come from a seed that all
regions share, while the code broadcasts a dense mask from rank 0; one entry of every round(1 / p)
consecutive ones is drawn, while the code draws Bernoulli(p) (`lowcomm_jax.channels.selection`);
what lands after a step lands before this step's values leave, while the code, which had a delay for
a while, read them first; and there what was in flight overwrote parts of a newer anchor.
"""

from __future__ import annotations

from typing import Any, Literal

import optax

from lowcomm_jax import outer as outer_rules
from lowcomm_jax.channels import Channel, Partitioned, Sampled, Shuffled
from lowcomm_jax.methods.base import Method
from lowcomm_jax.schedule import Never, Staggered

SELECTIONS = {"sampled": Sampled, "shuffled": Shuffled, "partitioned": Partitioned}


def sparta(
    p: float = 0.005,
    selection: Literal["sampled", "shuffled", "partitioned"] = "sampled",
    delay: int = 0,
    period: int | None = None,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
) -> Method:
    """Average a share p of the parameters after every step, and with `period` run DiLoCo too.

    Args:
      p: in (0, 0.5], realised as 1 / round(1 / p).
      selection: `sampled` anew at every step; `shuffled` once, so that every entry travels once in
        1 / p steps; `partitioned`, shuffled anew for every such cycle.
      delay: tau, inner steps; what a region makes of the selected entries in between is lost.
      period: H of DiLoCo; None = no main exchange.
      outer: of DiLoCo; default Nesterov 0.7 / 0.9.
      codec: of the selected values, without state; None = fp32. DiLoCo's payloads stay dense.
    """
    problems = []
    if selection not in SELECTIONS:
        problems.append(f"selection={selection!r}: use {', '.join(SELECTIONS)}")
    if period is None and outer is not None:
        problems.append("outer: without period there is no outer step; give both or neither")
    rule = SELECTIONS.get(selection, Sampled)(p)
    channels = (Channel("sparta", selection=rule, delay=delay, codec=codec),)
    if period is None:
        return Method("sparta", Never(), None, channels=channels, problems=tuple(problems))
    rule = outer_rules.nesterov(0.7, 0.9) if outer is None else outer
    return Method(
        name="sparta_diloco",
        schedule=Staggered(period),
        outer=optax.with_extra_args_support(rule),
        channels=channels,
        problems=tuple(problems),
    )
