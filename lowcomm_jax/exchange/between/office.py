"""What all exchanges of a region share."""

from __future__ import annotations

import dataclasses
import threading

from lowcomm_jax.exchange.between.beats import Beats
from lowcomm_jax.exchange.between.commits import Board
from lowcomm_jax.exchange.between.kv import Store
from lowcomm_jax.exchange.between.mishaps import Mishaps
from lowcomm_jax.exchange.between.secret import Seal
from lowcomm_jax.exchange.between.tally import Tally
from lowcomm_jax.exchange.between.terms import Heal
from lowcomm_jax.exchange.between.timing import Pace, Timing
from lowcomm_jax.exchange.between.transport import Transport


@dataclasses.dataclass(frozen=True)
class Office:
    """The parts of one region's exchange; `halted` ends its exchanges, `closing` everything."""

    run_id: str
    region: int
    count: int
    timing: Timing
    heal: Heal
    tally: Tally
    store: Store
    seal: Seal
    board: Board
    beats: Beats
    transport: Transport
    pace: Pace
    mishaps: Mishaps
    closing: threading.Event
    halted: threading.Event
