"""A region that comes into a run has compiled everything before it asks for a state."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
import pytest
from compilations import COMPILED
from regions.faults import vanish
from regions.test_same_numbers import METHODS
from regions.together import batches, engine, rows

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.compression import error_feedback, make
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.recovery.precompile import precompile

R, STEPS, SINCE = 3, 400, 14
# Threads share two cores with compilation: who is slow there is not dead.
TIMING = exchange.Timing(beat_s=0.02, dead_after_s=5.0, deadline_s=30.0)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "cocodc"]


@pytest.fixture
def compiled():
    """The threads that have compiled something, once for each program."""
    threads = []

    def note(event, *_, **__):
        if event == COMPILED:
            threads.append(threading.current_thread())

    jax.monitoring.register_event_duration_secs_listener(note)
    yield threads
    jax.monitoring.unregister_event_duration_listener(note)


class Company:
    """Regions 0 and 1 of a run that the last one has left; they train until `stop`."""

    def __init__(self, method, make):
        self.method, self.make = method, make
        self.entered, self.stop = threading.Event(), STEPS
        self.under_way = threading.Event()  # they have compiled what they need

    def __enter__(self):
        self._pool = ThreadPoolExecutor(R)
        made = list(self._pool.map(self.make, range(R)))
        vanish(made[-1])
        self._running = [self._pool.submit(self._train, region, made[region]) for region in (0, 1)]
        return self

    def __exit__(self, *error):
        self.entered.set()
        for one in self._running:
            one.result()
        self._pool.shutdown()

    def _train(self, region, own):
        with jax.numpy_dtype_promotion("standard"):
            one = engine(self.method(), R, own)
            one.run(one.init(oracle.make_params()), self._unhurried(region))

    def _unhurried(self, region):
        for step, batch in enumerate(batches(STEPS, R)):
            if step == self.stop:
                return
            if step == SINCE:
                self.under_way.set()
            # A period of several heartbeats, as where models are large.
            time.sleep(0.03 if self.entered.is_set() else 0.1)
            yield rows(batch, region)


@pytest.mark.parametrize("name", ["cocodc", *SLOW])
def test_nothing_is_compiled_once_a_state_is_asked_for(name, between, compiled):
    with Company(METHODS[name], between(R, TIMING)) as others:
        assert others.under_way.wait(60)
        own = between(R, TIMING)(R - 1)
        asks, before = own.want_state, []

        def want_state():
            before.append(len(compiled))
            asks()

        own.want_state = want_state
        one = engine(METHODS[name](), R, own)
        with jax.numpy_dtype_promotion("standard"):
            data = [rows(batch, R - 1) for batch in batches(STEPS, R)]
            state = rejoin.enter(one, one.init(oracle.make_params()), data[0])
            at = int(state.counters.step)
            others.stop = at + SINCE
            others.entered.set()
            state, history = one.run(state, data[at : at + SINCE])
            events = history.events

        def of_us(threads):
            me = threading.current_thread()
            return [t.name for t in threads if t is me or t.name.startswith("lowcomm-")]

        assert of_us(compiled[: before[0]]) and not of_us(compiled[before[0] :])
    sends = [event for event in events if event.kind == "send"]
    alone = {e.key for e in sends if (R - 1,) in (e.groups or ())}  # gossip leaves one over
    landings = [e for e in events if e.kind == "land" and e.step > at + 6 and e.key not in alone]
    assert landings and all(e.participants.all() for e in landings)


def test_what_another_region_does_not_give_stays_as_it_was(tmp_path):
    one = engine(METHODS["streaming"](), R, exchange.store(f"file://{tmp_path}", 0, R, "run"))
    with jax.numpy_dtype_promotion("standard"):
        [batch] = batches(1, R)
        state, _ = one.run(one.init(oracle.make_params()), [rows(batch, 0)])
        kept = jax.tree.map(np.array, _kept(state))
        state = precompile(one, state)
    jax.tree.map(np.testing.assert_array_equal, kept, _kept(state))


def test_what_an_earlier_job_has_compiled_is_compiled_for_a_newcomer_too(tmp_path):
    """Compiled programs are kept under the places of what they take, as these are written down."""
    one = engine(METHODS["diloco"](), R, exchange.store(f"file://{tmp_path}", 0, R, "run"))
    with jax.numpy_dtype_promotion("standard"):
        state = one.init(oracle.make_params())
        began = jax.tree.map(lambda x: x.sharding.spec, state.inner)
        state = precompile(one, state)
    assert jax.tree.map(lambda x: x.sharding.spec, state.inner) == began


def _kept(state):
    inner = {k: getattr(state.inner, k) for k in ("opt", "buffers", "step", "tokens")}
    return inner, state.landing, state.counters, state.in_flight


def test_a_run_at_another_level_of_its_codec_is_rehearsed_before_it_is_caught_up_with(
    tmp_path, monkeypatch
):
    method = lc.methods.dilocox(4, {"name": "low_rank", "least": 1.0}, 2, adaptive={"window": 2})
    one = engine(method, R, exchange.store(f"file://{tmp_path}", 0, R, "run"))
    with jax.numpy_dtype_promotion("standard"):
        further = one.init(oracle.make_params())
        further.counters.decided["level"] = np.int64(1)
        brought, levels = one.carrier.given(further), []

        def rehearsed(engine, state):
            levels.append(method.schedule.level(state.counters))
            return precompile(engine, state)

        monkeypatch.setattr(rejoin, "newest", lambda exchange: brought)
        monkeypatch.setattr(rejoin, "_compare", lambda *_: None)  # there is nobody
        monkeypatch.setattr(rejoin, "precompile", rehearsed)
        monkeypatch.setattr(rejoin, "catch_up", lambda engine, state, least: state)
        [batch] = batches(1, R)
        state = rejoin.enter(one, one.init(oracle.make_params()), rows(batch, 0))
    assert levels == [0, 1]
    for name, x in further.anchor.items():
        np.testing.assert_array_equal(state.anchor[name], x)


CODECS = {
    "random_k": make("random_k", one_in=3, seed=5),
    # The parameters' matrices are small.
    "low_rank": error_feedback(make("low_rank", seed=5, rank=1, least=1.0)),
}


@pytest.mark.parametrize("name", list(CODECS))
def test_codecs_begin_as_at_step_0(name, tmp_path):
    """A region that comes into a run encodes as one that has not sent anything yet."""
    codec = CODECS[name]
    method = lc.methods.diloco(4, lc.outer.nesterov(0.6, 0.85), codec=codec)
    one = engine(method, 2, exchange.store(f"file://{tmp_path}", 0, 2, "run"))
    with jax.numpy_dtype_promotion("standard"):
        [batch] = batches(1, 2)
        state, _ = one.run(one.init(oracle.make_params()), [rows(batch, 0)])
        # Of a checkpoint: it has encoded before.
        state = state.replace(codec=jax.tree.map(lambda x: x + 1, state.codec))
        _, *taken = one.carrier.given(state)
        state = rejoin.install(one.sync_loop(state), precompile(one, state), *taken)
    like = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in state.anchor.items()}
    [found], fresh = state.codec, codec.init(like)
    assert any(np.any(x) for x in jax.tree.leaves(fresh))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), found, fresh)
