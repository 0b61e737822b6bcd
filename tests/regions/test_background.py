"""One owner starts, watches and joins a job's background work."""

import threading

from lowcomm_jax.store import background
from lowcomm_jax.store.background import Background


def test_an_error_that_a_function_lets_through_is_told():
    told = []
    one = Background(told.append)
    one.begin("divides", lambda: 1 / 0).join()
    assert [type(error) for error in told] == [ZeroDivisionError]


def test_join_wakes_and_waits_also_for_what_is_begun_meanwhile_but_not_for_itself():
    one, asked, done = Background(None), threading.Event(), []

    def first():
        asked.wait()
        one.begin("second", lambda: done.append("second"))
        one.join()  # it runs itself: it does not wait for itself
        done.append("first")

    one.begin("first", first, asked.set)
    assert one._others(serving=False)
    one.join()
    assert not one._others(serving=False) and done == ["second", "first"]


def test_what_serves_others_goes_on_until_the_job_leaves(monkeypatch):
    one, closing = Background(None), threading.Event()
    monkeypatch.setattr(background, "_WITHIN_S", 20.0)
    serves = one.begin("serve", closing.wait, serves=True)
    one.join(leaves=False)
    assert serves.is_alive() and not one._others(serving=False)
    closing.set()
    one.join()
    assert not serves.is_alive()


def test_what_does_not_end_is_named_and_left(monkeypatch, caplog):
    one, over = Background(None), threading.Event()
    monkeypatch.setattr(background, "_WITHIN_S", 0.05)
    one.begin("stuck", over.wait)
    one.join()
    assert "lowcomm-stuck did not end in 0 s, and is left" in caplog.text
    over.set()
