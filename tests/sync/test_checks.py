"""What an engine makes of its settings before anything runs."""

import jax
import numpy as np
import optax
from refused_lines import lines_of, loss_fn

import lowcomm_jax as lc
from lowcomm_jax.network import uniform


def test_the_clock_of_a_network_keeps_bars_for_its_picture_from_the_beginning():
    engine = lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(2), 3, network=uniform(3, 1.0))
    assert engine.clock.timeline() is not None
    assert lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(2), 3).clock is None
    (line,) = lines_of(lc.methods.diloco(2), network=uniform(2, 1.0))
    assert line == "network has 2 regions, the engine 3: make them equal"


def test_a_payload_of_a_lower_rank_travels_shorter():
    """Factors of an 8 x 9 matrix: 17 numbers a rank, which travel as long as a step takes."""
    seconds, ranks = 8 * 17 * 4 / 1e9, (4, 3, 2, 1)
    links = uniform(2, 1.0, compute_s=seconds)
    method = lc.methods.dilocox(
        20, {"name": "low_rank", "least": 1.0}, 4, adaptive={"buckets": 4, "floor": 1}
    )
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    engine = lc.Engine(lambda *_: 0.0, optax.sgd(0.1), method, 2, mesh=mesh, network=links)
    state = engine.init({"w": np.zeros((8, 9), np.float32)})
    schedule = engine.sync_loop(state).programs.method.schedule
    assert schedule.ranks == schedule.travel == ranks
