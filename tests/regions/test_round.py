"""A round's own payload where the store does not answer, and what earlier jobs have left of it."""

import itertools

import numpy as np
import pytest
from regions.party import until

from lowcomm_jax import exchange
from lowcomm_jax.rounds.request import ExchangeRequest
from lowcomm_jax.rounds.round import Round
from lowcomm_jax.store.context import keep_looking
from lowcomm_jax.store.records import Payload


def test_a_payload_is_packed_once_however_often_it_is_tried(store_party, monkeypatch):
    [one] = store_party.run(1)
    context = one._context
    round = Round(context, ExchangeRequest("k", "1/k", (0,), takes_part=True))
    round.to_host({"x": np.ones((1, 4), np.float32)})
    left, done = {"put": 2, "announce": 2}, []

    def at_times_away(owner, name):
        act = getattr(owner, name)

        def call(*given):
            if left[name]:
                left[name] -= 1
                raise exchange.StoreUnavailable("away")
            done.append(name)
            return act(*given)

        monkeypatch.setattr(owner, name, call)

    at_times_away(context.transport, "put")
    at_times_away(context.commit_log, "announce")
    for _ in range(4):
        with pytest.raises(exchange.StoreUnavailable):
            round.publish({})
    assert round.publish({}) and done == ["put", "announce"]
    assert (
        len(context.store.list("blob/")) == 1
        and round.own.digests == round.published["1/k"][context.heartbeat.job]
    )
    assert round._packed is None, "its bytes are the transport's now"


def test_what_an_earlier_job_has_left_of_an_exchange_that_is_sent_again_is_removed(store_party):
    first, other = store_party.run(2, keep=1)
    first.start("1", {"x": np.ones((1, 4), np.float32)})
    until(lambda: first._open["1"].own)
    first._context.heartbeat.stop(leaving=False)
    again = store_party.joined(0, 2, keep=1)
    for number in range(1, 8):
        for x in (again, other):
            x.start(f"{number}", {"x": np.full((1, 4), number, np.float32)})
        for x in (again, other):
            x.finish(f"{number}")
    left = lambda: [k for k in again._context.store.list("round/") if "/1/announce.0." in k]  # noqa: E731
    until(lambda: not left(), 20.0)


class Waits:
    """An event that is never set, and notes for how long it was waited for."""

    def __init__(self):
        self.seconds = []

    def wait(self, seconds):
        self.seconds.append(seconds)

    def clear(self):
        """It is not set."""


def test_pauses_between_looks_grow_until_something_is_new_also_while_the_store_is_away():
    waits, looks = Waits(), iter([False, False, exchange.StoreUnavailable("away"), True, False])
    left = 5

    def look():
        nonlocal left
        left -= 1
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    keep_looking("k", look, lambda: not left, waits, lambda: itertools.count(1))
    assert waits.seconds == [1, 2, 3, 1], "and none after the last look"


def test_what_ends_the_looks_is_asked_before_each_and_may_raise():
    def over():
        raise RuntimeError("exchanges close")

    with pytest.raises(RuntimeError, match="exchanges close"):
        keep_looking("k", lambda: 1 / 0, over, Waits(), itertools.count)


def test_what_belongs_to_a_payload_is_announced_with_it_once_it_was_sent(store_party):
    [one] = store_party.run(1)
    context = one._context
    early = Round(context, ExchangeRequest("e", "1/e", (0,)))
    round = Round(context, ExchangeRequest("k", "1/k", (0,), takes_part=True), early)
    round.to_host({"x": np.ones((1, 4), np.float32)})
    assert not round.publish({}) and not round.announcements
    early.sent = Payload("early", 3)
    assert round.publish({}) and round.own.early == Payload("early", 3)
