"""A store that answers never, such as a hung mount: nothing may wait for it without end."""

import os
import signal
import threading
import time

import pytest
import tensorstore as ts
from regions.party import TIMING, send, until

from lowcomm_jax import exchange
from lowcomm_jax.interrupt import InterruptedBeforeError, raised
from lowcomm_jax.store import background
from lowcomm_jax.store.kv import MetricsCounter, Store


class Never:
    """An operation of TensorStore's that is never done."""

    def __init__(self):
        self.cancelled = False

    def exception(self, timeout=None):
        if timeout is None:
            pytest.fail("waits without a limit")
        time.sleep(timeout)
        raise TimeoutError("no answer")

    def cancel(self):
        self.cancelled = True


class Hung:
    def __init__(self, future):
        self.read = self.write = self.list = lambda *args, **kwargs: future


def test_an_operation_that_never_ends_is_given_up(tmp_path):
    store = Store(f"file://{tmp_path}", "run", MetricsCounter(), timeout_s=0.05)
    never = Never()
    store._kv, store._folder = Hung(never), None  # files are created without it
    for act in (
        lambda: store.read("k"),
        lambda: store.list("k"),
        lambda: store.write("k", b"x"),
        lambda: store.delete("k"),
        lambda: store.create("k", b"x"),
    ):
        with pytest.raises(exchange.StoreUnavailable, match="no answer"):
            act()
    assert never.cancelled


def test_who_waits_for_a_store_that_is_closed_is_let_go(tmp_path):
    """No thread is left inside TensorStore when the interpreter ends."""
    store = Store(f"file://{tmp_path}", "run", MetricsCounter(), timeout_s=600.0)
    store._kv = Hung(Never())
    threading.Timer(0.2, store.close).start()
    began = time.monotonic()
    with pytest.raises(exchange.StoreUnavailable, match="no answer"):
        store.read("k")
    assert time.monotonic() - began < 60


def test_what_a_signal_raises_is_no_trouble_of_the_store(tmp_path):
    """Else whoever asks the store again after trouble would go on waiting."""
    store = Store(f"file://{tmp_path}", "run", MetricsCounter(), timeout_s=60.0)
    kept, never = ts.Promise.new()
    store._kv = Hung(never)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(InterruptedBeforeError, match="SIGTERM"), raised():
        store.read("k")
    kept.set_result(None)


@pytest.mark.parametrize("exchanging", [False, True])
def test_a_job_leaves_although_its_store_hangs(exchanging, store_party, monkeypatch, caplog):
    """Each request would be given a minute, and the heartbeat makes two more of them.

    The others are not told that it leaves: they see it die, as after every silence.
    """
    monkeypatch.setattr(background, "_WITHIN_S", 1.0)
    one, other = store_party.run(2)
    store, began = one._context.store, time.monotonic()
    if exchanging:
        send([one], "k")
        until(lambda: one._open["k"].own is not None)
    store._kv = Hung(Never())
    time.sleep(4 * TIMING.beat_s)  # all are inside a request now
    one.close(linger_s=0.0)
    took = time.monotonic() - began
    # To be told: 2 answer_s. To end then: two looks whether the store was closed. Twice _WITHIN_S.
    assert took < 2 * TIMING.answer_s + 2 * 0.5 + 2 * 1.0 + 30.0
    assert not one._context.heartbeat._thread.is_alive()
    assert [x for x in one._context.background._running if x.thread.is_alive()] == []
    assert "does not answer" in caplog.text
    until(lambda: other.steps().keys() == {1})
