"""What a region was not counted with it has not sent: nothing is lost, and nothing sent twice."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import oracle
import pytest
from regions.faults import vanish
from regions.party import check, land, send, until
from regions.together import batches, engine, rows

import lowcomm_jax as lc
from experiments.faults.fault import Fault
from experiments.faults.fault_hooks import ScriptedFaults
from lowcomm_jax import exchange
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.compression import error_feedback, make
from lowcomm_jax.jobs.job_carrier import JobCarrier, PendingExchange, uncounted
from lowcomm_jax.state.train_state import InFlight

R, PERIOD, OVERLAP, STEPS = 2, 6, 2, 21
LEFT_OUT = Fault(2 * PERIOD, "corrupt", region=1, steps=1)  # of three payloads the second
SAVING = threading.Lock()  # Orbax expects one at a time in a process
CODEC = error_feedback(make("topk", k=1, block=8))


def method():
    outer = lc.outer.nesterov(0.6, 0.85)
    return lc.methods.streaming_diloco(PERIOD, 1, OVERLAP, 0.3, outer=outer, codec=CODEC)


class Region:
    """One region's job.

    Attributes:
      sent: by step, (pseudo-gradient, what its payload decodes to).
    """

    def __init__(self, region, between, folder):
        self.region, self.between, self.folder = region, between, folder
        self.sent = {}

    def begin(self):
        """An engine in an exchange of its own."""
        hooks = ScriptedFaults([LEFT_OUT], self.region)
        self.exchange = self.between(R, fault_hooks=hooks)(self.region)
        one = engine(method(), R, self.exchange)
        post = one.carrier.post

        def spied(loop, state, key, flight, **more):
            anchor = state.anchor
            theta = {k: x[0] for k, x in flight.snapshot.items()}
            payload = jax.tree.map(lambda x: x[0], flight.payload)
            delta = {k: np.asarray(anchor[k][0] - theta[k]) for k in theta}
            self.sent[int(flight.sent)] = delta, CODEC.decode(payload, theta)
            return post(loop, state, key, flight, **more)

        one.carrier.post = spied
        return one

    def train(self, one, state, stop):
        data = batches(STEPS, R)[int(state.counters.step) : stop]
        return one.run(state, [rows(batch, self.region) for batch in data])

    def first(self, stop):
        """Until a step at which it saves, and stops with all others."""
        with jax.numpy_dtype_promotion("standard"):
            one = self.begin()
            state, history = self.train(one, one.init(oracle.make_params()), stop)
            with SAVING, Checkpoints(self.folder / str(self.region)) as checkpoints:
                checkpoints.save(state, extra={}, config={})
        self.exchange.pause()
        return history.events

    def again(self):
        """From there to the end."""
        vanish(self.exchange)
        with jax.numpy_dtype_promotion("standard"):
            one = self.begin()
            with SAVING, Checkpoints(self.folder / str(self.region)) as checkpoints:
                state = checkpoints.restore(one, oracle.make_params(), config={}).state
            one.reconnect(state)
            state, history = self.train(one, state, STEPS)
        return state, history.events


@pytest.mark.parametrize("stop", [13, 15])  # the second payload is under way, or has landed
def test_sent_and_residual_are_the_sum_of_the_pseudo_gradients(stop, between, tmp_path):
    jobs = [Region(region, between, tmp_path) for region in range(R)]
    with ThreadPoolExecutor(R) as pool:
        events = list(pool.map(lambda job: job.first(stop), jobs))
        ends = list(pool.map(lambda job: job.again(), jobs))
    for job, (state, more), before in zip(jobs, ends, events):
        landings = [e for e in [*before, *more] if e.kind == "land"]
        counted = [bool(e.participants[0]) for e in landings]
        assert counted == [True, job.region == 0, True]
        taken = [job.sent[e.step - OVERLAP] for e, yes in zip(landings, counted) if yes]
        for name, residual in state.codec[0].residual.items():
            whole = sum(delta[name] for delta, _ in taken)
            sent = sum(decoded[name] for _, decoded in taken)
            np.testing.assert_allclose(sent + residual[0], whole, rtol=1e-5, atol=1e-6)


def flight(**given):
    """A payload of fragment 0 that this region has sent, of which no more is known than that."""
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(InFlight))
    sent = {"takes_part": np.ones(1, bool), "fragment": np.int64(0), "sent": np.int64(PERIOD)}
    return InFlight(**{**nothing, **sent, "anchor_updated": np.int64(0), **given})


def under_way(last_sent=PERIOD, **given):
    """A state with payload "k" in flight; and the codec's state from before that was sent."""
    with jax.numpy_dtype_promotion("standard"):
        state = engine(method(), 1).init(oracle.make_params())
    before = jax.tree.map(lambda x: x + np.asarray(1, x.dtype), state.codec[0])
    counters = dataclasses.replace(state.counters, last_sent=np.array([last_sent]))
    in_flight = {"k": flight(kept=before, **given)}
    return state.replace(in_flight=in_flight, counters=counters), before


def test_a_checkpoint_must_tell_what_was_before(tmp_path):
    one = engine(method(), R, exchange.store(f"file://{tmp_path}", 0, R, "run"))
    with jax.numpy_dtype_promotion("standard"):
        state = one.init(oracle.make_params())
    with pytest.raises(ValueError, match="without the codec's state from before it"):
        one.reconnect(state.replace(in_flight={"0@0": flight(sent=np.int64(0))}))


@pytest.mark.parametrize("later", [False, True])
def test_an_old_residual_does_not_take_the_place_of_a_newer_one(later):
    """Where the fragment was sent again since, its residual follows from the payload lost here."""
    state, before = under_way(PERIOD * (1 + later))
    after = uncounted(state, "k")
    assert not after.in_flight["k"].takes_part.any()
    expected = state.codec[0] if later else before
    jax.tree.map(np.testing.assert_array_equal, after.codec[0], expected)


def test_a_payload_of_the_job_before_counts_and_is_not_this_jobs(party):
    """As with gossip, where a region that comes back does not look what its groups have sent."""
    regions = party.run(3)
    send(regions[:2], "k", members=(0, 1))
    first = land(regions[:2], "k")[0]
    vanish(regions[0])
    again = party.joined(0, 3)
    send([again], "k", 7, members=(0, 1))
    (second,) = land([again], "k")
    for arrived, ours in ((first, True), (second, False)):
        check(arrived, 3, [0, 1])
        assert arrived.ours is ours
    until(lambda: regions[1]._context.wait_list.awaited(0))
    send([regions[1], again], "l", 1, members=(0, 1))
    assert all(arrived.ours for arrived in land([regions[1], again], "l"))


@pytest.mark.parametrize("ours", [True, False])
def test_who_is_not_counted_by_a_payload_of_its_own_has_its_residual_back(ours):
    state, before = under_way(payload={}, header={})
    both, weights = np.ones(R, bool), {"weight": np.ones(R, np.float32)}
    arrived = exchange.Arrived(both, ours, weights, None, 0.0, 0.0)
    there = SimpleNamespace(count=R, region=0, ready=lambda name: True, finish=lambda name: arrived)
    carrier = JobCarrier(there, method())
    carrier._pending["k"] = PendingExchange("7", {}, (0, 1), True, None)
    after, collected = carrier.collect(None, state, "k", False, True)
    assert collected.flight.takes_part.all() and collected.flight.weight.tolist() == [1, 1]
    assert after.in_flight["k"].takes_part.all() == ours
    jax.tree.map(np.testing.assert_array_equal, after.codec[0], state.codec[0] if ours else before)
