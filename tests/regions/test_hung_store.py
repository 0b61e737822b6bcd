"""A store that answers never, such as a hung mount: nothing may wait for it without end."""

import threading
import time

import pytest

from lowcomm_jax import exchange
from lowcomm_jax.store.kv import MetricsCounter, Store


class Never:
    """An operation of TensorStore's that is never done."""

    def __init__(self):
        self.cancelled = False

    def result(self, timeout=None):
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
