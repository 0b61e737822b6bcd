"""Low-communication training methods, one paper a file, each a composition of the same parts.

In: a paper's settings, as keywords of a factory. Out: a `Method`, which names a schedule, an outer
rule, a landing rule, a codec, a topology, roles, a batch policy and channels. No method knows the
engine.

A factory raises for a setting that a rule refuses when it is made. What else cannot work becomes
`Method.problems`, or is a row of `lowcomm_jax.refusals`: the engine refuses it all at once.
"""

from lowcomm_jax.methods.adloco import adloco
from lowcomm_jax.methods.async_local_sgd import async_local_sgd
from lowcomm_jax.methods.base import Method
from lowcomm_jax.methods.cocodc import cocodc
from lowcomm_jax.methods.ddp import ddp
from lowcomm_jax.methods.decoupled_diloco import decoupled_diloco
from lowcomm_jax.methods.decoupled_momentum import decoupled_momentum
from lowcomm_jax.methods.delayed_diloco import delayed_diloco
from lowcomm_jax.methods.demo import demo
from lowcomm_jax.methods.des_loc import des_loc
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.methods.dilocox import AdaGradCmp, dilocox
from lowcomm_jax.methods.eager_diloco import eager_diloco
from lowcomm_jax.methods.edit import a_edit, edit
from lowcomm_jax.methods.gasloc import gasloc
from lowcomm_jax.methods.halos import halos
from lowcomm_jax.methods.heloco import heloco
from lowcomm_jax.methods.isoloco import isoloco
from lowcomm_jax.methods.local_sgd import local_sgd
from lowcomm_jax.methods.muloco import muloco
from lowcomm_jax.methods.noloco import noloco
from lowcomm_jax.methods.partial_updates import partial_updates
from lowcomm_jax.methods.pulseloco import pulseloco
from lowcomm_jax.methods.restarted_diloco import restarted_diloco
from lowcomm_jax.methods.snoo import snoo
from lowcomm_jax.methods.sparseloco import sparseloco
from lowcomm_jax.methods.sparta import sparta
from lowcomm_jax.methods.spes import spes
from lowcomm_jax.methods.streaming_diloco import streaming_diloco

__all__ = [
    "NAMES",
    "AdaGradCmp",
    "Method",
    "a_edit",
    "adloco",
    "async_local_sgd",
    "cocodc",
    "ddp",
    "decoupled_diloco",
    "decoupled_momentum",
    "delayed_diloco",
    "demo",
    "des_loc",
    "diloco",
    "dilocox",
    "eager_diloco",
    "edit",
    "gasloc",
    "halos",
    "heloco",
    "isoloco",
    "local_sgd",
    "muloco",
    "noloco",
    "partial_updates",
    "pulseloco",
    "restarted_diloco",
    "snoo",
    "sparseloco",
    "sparta",
    "spes",
    "streaming_diloco",
]

NAMES = {name: globals()[name] for name in __all__ if name.islower()}
