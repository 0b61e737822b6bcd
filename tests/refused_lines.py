"""What the table of refusals says of a method, for tests."""

import dataclasses

import jax
import optax

import lowcomm_jax as lc
from lowcomm_jax import refusals
from lowcomm_jax.adloco.setup import AdaptiveSetup
from lowcomm_jax.setup import Setup


@dataclasses.dataclass(frozen=True)
class Others:
    """An exchange between jobs, described (`setup.BetweenJobs`)."""

    count: int
    lingers: bool = False
    region: int = 0
    heal: str = "stop"


def loss_fn(params, batch, rng):
    """A loss function that is never called."""
    del params, batch, rng
    return 0.0


def lines_of(method: lc.methods.Method, regions: int = 3, **settings) -> list[str]:
    """The lines about these settings of an engine that can have this method, on one device."""
    settings = {"mesh": lc.make_mesh(devices=jax.devices()[:1]), **settings}
    make = AdaptiveSetup if method.adapts else Setup
    setup = make(loss_fn, optax.sgd(0.1), method, regions, **settings)
    return [line.text for line in refusals.problems(setup)]


def lines_between_jobs(method: lc.methods.Method, regions: int = 3, **settings) -> list[str]:
    """The same where each region is a job."""
    return lines_of(method, regions, exchange=Others(regions), **settings)
