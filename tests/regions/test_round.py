"""A round's own payload where the store does not answer, and what earlier jobs have left of it."""

import numpy as np
import pytest
from regions.party import until

from lowcomm_jax import exchange
from lowcomm_jax.rounds.request import ExchangeRequest
from lowcomm_jax.rounds.round import Round


def test_a_payload_is_packed_once_however_often_it_is_tried(store_party, monkeypatch):
    [one] = store_party.run(1)
    context = one._context
    round = Round(context, ExchangeRequest("k", "1/k", (0,), takes_part=True))
    round.to_host({"x": np.ones((1, 4), np.float32)})
    announce, left = context.commit_log.announce, [exchange.StoreUnavailable("away")] * 3

    def away(*given):
        if left:
            raise left.pop()
        return announce(*given)

    monkeypatch.setattr(context.commit_log, "announce", away)
    for _ in range(3):
        with pytest.raises(exchange.StoreUnavailable):
            round.publish(lambda act: act(), {}, lambda: None)
    round.publish(lambda act: act(), {}, lambda: None)
    assert (
        len(context.store.list("blob/")) == 1
        and round.own.digests == round.published["1/k"][context.heartbeat.job]
    )
    assert round._packed is None, "its bytes are the transport's now"


def test_what_an_earlier_job_has_left_of_an_exchange_that_is_sent_again_is_removed(store_party):
    first, other = store_party.run(2, keep=1)
    first.start("1", {"x": np.ones((1, 4), np.float32)})
    until(lambda: first._open["1"].exchange.own)
    first._context.heartbeat.stop(leaving=False)
    again = store_party.region(0, 2, keep=1)
    again.join(20.0)
    like = {"x": np.zeros((1, 4), np.float32)}
    for number in range(1, 8):
        for x in (again, other):
            x.start(f"{number}", {"x": np.full((1, 4), number, np.float32)})
        for x in (again, other):
            x.finish(f"{number}", like)
    left = lambda: [k for k in again._context.store.list("round/") if "/1/announce.0." in k]  # noqa: E731
    until(lambda: not left(), 20.0)
