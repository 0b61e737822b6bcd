"""The virtual network between regions: links, routes, a clock and a ledger of bytes.

In: a description of a network (`parse`), and the sends and landings of a run (`drive`,
`replay`). Out: `VirtualClock` gives the seconds every region computes and waits. Its `Ledger`
counts bytes by region, link and fragment. `sync_seconds` and `derive_tau` give a schedule its T_s
and tau.

NumPy only, deterministic, seeded. "Clock" means this virtual clock; the counters of training are
`state.SyncCounters`.
"""

from lowcomm_jax.network.clock import ClockReport, VirtualClock, clock_state, restore_clock
from lowcomm_jax.network.collectives import (
    derive_tau,
    profile,
    step_seconds,
    sync_seconds,
)
from lowcomm_jax.network.drive import BASELINE, drive, every_step, follow, replay
from lowcomm_jax.network.ledger import Ledger
from lowcomm_jax.network.links import Network, uniform
from lowcomm_jax.network.parse import names, parse
from lowcomm_jax.network.randomness import Jitter
from lowcomm_jax.network.routes import ROUTES, link_bytes
from lowcomm_jax.network.timeline import Bar, Timeline, draw

__all__ = [
    "BASELINE",
    "ROUTES",
    "Bar",
    "ClockReport",
    "Jitter",
    "Ledger",
    "Network",
    "Timeline",
    "VirtualClock",
    "clock_state",
    "derive_tau",
    "draw",
    "drive",
    "every_step",
    "follow",
    "link_bytes",
    "names",
    "parse",
    "profile",
    "replay",
    "restore_clock",
    "step_seconds",
    "sync_seconds",
    "uniform",
]
