"""What a payload lands on: its own age, and the rule's state of who lands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from params.tiny_runs import R, engine

import lowcomm_jax as lc
from experiments.faults.simulated import Replayed
from lowcomm_jax.sync.finish import finish

START = {"w": np.float32([1.0, -2.0])}


def square_loss(params, batch, rng):
    return ((params["w"] - batch["x"].mean()) ** 2).sum()


def test_a_landing_rules_state_is_that_of_who_landed_something():
    """Who was left out adopts the anchor itself: its rule has landed nothing."""
    count = optax.GradientTransformationExtraArgs(
        lambda params: {"landings": jnp.int32(0)},
        lambda updates, state, params, **_: (updates, {"landings": state["landings"] + 1}),
    )
    method = dataclasses.replace(lc.methods.streaming_diloco(2, 1, 1, 0.0), landing=count)
    one = engine(square_loss, method, skip_nonfinite=False)
    state = one.init(START)
    for third in (3.0, np.nan, 1.0, 2.0, 0.5):
        state, _ = one.step(state, {"x": np.float32([[1.0], [2.0], [third]])})
    assert np.asarray(state.landing[0]["landings"]).tolist() == [2, 2, 1]


def test_an_asynchronous_payload_is_as_old_as_the_anchor_it_was_measured_against():
    one = engine(square_loss, lc.methods.async_local_sgd(4, (1.0, 1.0, 0.5), dynamic=False))
    state, ages = one.init(START), []
    for t in range(8):
        state, metrics = one.step(state, {"x": np.full((R, 1), t, np.float32)})
        ages += [(e.step, e.staleness.tolist()) for e in metrics["events"] if e.kind == "land"]
    assert ages == [
        (4, [4, -1, -1]),
        (4, [-1, 4, -1]),
        (8, [4, -1, -1]),
        (8, [-1, 4, -1]),
        (8, [-1, -1, 8]),
    ]


def test_in_a_replayed_run_those_adopt_that_adopted_in_it():
    one = engine(square_loss, lc.methods.diloco(2))
    state = one.init(START)
    one.sync_loop(state).carrier = Replayed(lambda sent: np.array([sent == 4, True, False]))
    for t in range(1, 5):
        state, _ = one.step(state, {"x": np.float32([[1.0], [2.0], [t]])})
        if t in (2, 4):
            w, anchor = np.asarray(state.inner.params["w"]), np.asarray(state.anchor["w"])
            assert np.all(w == anchor, axis=1).tolist() == [t == 4, True, False]


def test_a_replayed_boundary_is_adopted_by_all_who_sent_there():
    """Who was absent there has not sent: what became of the round before decides nothing."""
    one = engine(square_loss, lc.methods.delayed_diloco(2))
    state = one.init(START)
    one.sync_loop(state).carrier = Replayed(lambda sent: np.array([True, sent != 2, True]))
    batch = {"x": np.float32([[1.0], [2.0], [3.0]])}
    state, record = one.run(state, [batch] * 4)
    landings = [e for row in record.rows() for e in row["events"] if e["kind"] == "land"]
    assert [(e["step"], list(e["participants"])) for e in landings] == [
        (2, [True, True, True]),
        (4, [True, True, True]),
    ]


def test_a_learner_that_is_down_at_the_end_adopts_nothing_before_the_last_synchronisation():
    method = lc.methods.decoupled_diloco(4, 1, 2, outages=((1, 5, 9),))
    one = engine(square_loss, method)
    state, _ = one.run(one.init(START), [{"x": np.float32([[1.0], [2.0], [3.0]])}] * 5)
    assert len(state.in_flight) == 1
    state, events = finish(one.sync_loop(state), state)
    up, everyone = [True, False, True], [True, True, True]
    assert [(e.kind, e.participants.tolist()) for e in events] == [
        ("land", up),
        ("send", up),
        ("land", everyone),
    ]
    assert state.counters.sends.tolist() == [2]


def test_at_the_end_every_fragment_in_flight_lands_on_itself():
    """Two payloads are under way: each moves its own fragment once, and is not sent again."""
    method = lc.methods.streaming_diloco(4, 2, 3, 0.0, outer=optax.sgd(0.5), pattern=["a", "b"])
    start = {"a": START["w"], "b": START["w"] + 3}

    def loss(params, batch, rng):
        return sum(square_loss({"w": x}, batch, rng) for x in params.values())

    one = engine(loss, method)
    batches = [{"x": np.float32([[t], [2 * t], [-t]])} for t in range(4)]
    state, _ = one.run(one.init(start), batches)
    payloads = [np.array(x) for f in state.in_flight.values() for x in f.payload.values()]
    final = one.finish(state)
    for value, payload, before in zip(final.anchor.values(), payloads, start.values(), strict=True):
        np.testing.assert_allclose(value[0], before - 0.5 * payload.mean(0), rtol=1e-6)


def test_who_takes_part_in_the_last_synchronisation_is_asked_for_every_fragment():
    method = lc.methods.streaming_diloco(9, 2, 0, 0.0, outer=optax.sgd(1.0), pattern=["a", "b"])

    def loss(params, batch, rng):
        return sum(square_loss({"w": x}, batch, rng) for x in params.values())

    one = engine(loss, method)
    state = one.init({"a": START["w"], "b": START["w"]})
    state, _ = one.step(state, {"x": np.ones((R, 1), np.float32)})
    masks = [[True, False, True], [False, True, False]]
    _, events = finish(one.sync_loop(state), state, lambda p: masks[p])
    sent = [(e.fragment, e.participants.tolist()) for e in events if e.kind == "send"]
    assert sent == list(enumerate(masks))


def test_who_copies_a_peer_gets_all_of_one_region_and_nothing_else():
    """Its parameters and its optimizer's momenta: two numbers each."""
    method = lc.methods.decoupled_diloco(3, 1, 1, outages=((1, 2, 4),))
    one = engine(square_loss, method, optax.sgd(0.1, momentum=0.9))
    batches = [{"x": np.full((R, 1), t, np.float32)} for t in range(6)]
    _, history = one.run(one.init(START), batches)
    (event,) = [e for e in history.events if e.kind == "recover"]
    assert event.participants.tolist() == [False, True, False]
    assert event.bytes_sent.tolist() == [16, 0, 0] and event.bytes_received.tolist() == [0, 16, 0]


def test_values_land_alike_however_replicas_are_computed():
    """One after the other, or as one batch: each region's values with its own snapshot."""
    method, found = lc.methods.streaming_diloco(2, 1, 1, 0.5), []
    for replicas in ("map", "vmap"):
        one = engine(square_loss, method, replicas=replicas)
        state = one.init({"w": START["w"][:, None]})
        for t in range(5):
            state, _ = one.step(state, {"x": np.float32([[t], [2 * t], [-t]])})
        found.append(np.asarray(state.inner.params["w"]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    assert np.ptp(found[0][:, 0]) > 0.1


def test_where_a_worker_arrives_its_state_and_its_servers_take_the_place_of_the_old():
    one = engine(square_loss, lc.methods.halos(1, (1.0,) * R, ((0, 1), (2,)), every=9))
    state = one.init(START)
    before = jax.tree.leaves((state.inner.params, state.received, state.servers))
    state, _ = one.step(state, {"x": np.float32([[1.0], [2.0], [3.0]])})
    assert all(x.is_deleted() for x in before)
    assert not any(x.is_deleted() for x in jax.tree.leaves((state.received, state.servers)))


def test_after_the_last_synchronisation_everyone_holds_the_anchor():
    """Who landed before others, or takes no part, too: its next Delta is against what it holds."""
    one = engine(square_loss, lc.methods.async_local_sgd(4, (1.0,) * R))
    state, _ = one.step(one.init(START), {"x": np.float32([[1.0], [2.0], [3.0]])})
    state = one.finish(state, lambda _: [True, False, True])
    for held in (state.received, state.inner.params):
        np.testing.assert_array_equal(held["w"], np.tile(state.anchor["w"], (R, 1)))


def test_arrivals_before_the_end_do_not_count_towards_a_servers_next_update():
    one = engine(square_loss, lc.methods.halos(1, (1.0,) * R, ((0, 1), (2,)), every=4))
    state, batch = one.init(START), {"x": np.float32([[1.0], [2.0], [3.0]])}
    state, _ = one.step(state, batch)
    state, left = one.finish(state), []
    for _ in range(2, 6):
        state, metrics = one.step(state, batch)
        left += [e.key for e in metrics["events"] if e.kind == "send" and e.key.startswith("up")]
    assert left == ["up@3/0", "up@5/0", "up@5/1"]
