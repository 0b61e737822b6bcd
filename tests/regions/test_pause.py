"""Regions that stop together, and go on together later."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import oracle
import pytest
from regions.party import TIMING, at_once, check, land, send
from regions.test_same_numbers import assert_same
from regions.together import batches, engine, rows, train, values

import lowcomm_jax as lc
from lowcomm_jax import exchange


def test_all_take_what_the_first_has_proposed(party):
    regions = party.run(3)
    proposed = at_once(lambda x: x.agree("stop", {"step": 10 + x.region}), regions)
    assert proposed[0]["step"] in (10, 11, 12) and proposed == [proposed[0]] * 3
    assert regions[0].agree("stop", {"step": 99}) == proposed[0]
    assert regions[0].agree("other", {"step": 99}) == {"step": 99}


def test_a_store_that_is_away_is_asked_for_as_long_as_is_said(store_party, monkeypatch):
    [region] = store_party.run(1)
    log, answers = region._context.commit_log, [exchange.StoreUnavailable("away")] * 3
    agree = log.agree

    def after_a_while(*given):
        if answers:
            raise answers.pop()
        return agree(*given)

    monkeypatch.setattr(log, "agree", after_a_while)
    with pytest.raises(exchange.StoreUnavailable):
        region.agree("stop", {"step": 1})
    assert region.agree("stop", {"step": 2}, wait_s=30.0) == {"step": 2} and not answers


def test_what_is_under_way_ends_without_an_outcome_and_can_be_sent_again(party):
    regions = party.run(2)
    assert regions[0].agree("stop", {"step": 1}) == {"step": 1}
    send(regions[:1], "k")
    at_once(lambda x: x.pause(), regions)
    with pytest.raises(RuntimeError, match="'k' was not finished"):
        land(regions[:1], "k")
    at_once(lambda x: x.close(linger_s=0.0), regions)
    again = party.run(2)
    # What was agreed on before does not bind those who begin anew.
    assert again[1].agree("stop", {"step": 2}) == {"step": 2}
    send(again, "k", 1)
    for arrived in land(again, "k"):
        check(arrived, 2, [0, 1], 1)


BLOCKING = lc.methods.delayed_diloco(4, first_round="blocking")


@pytest.mark.parametrize(
    "method, away",
    [
        (lc.methods.diloco(4), False),
        (BLOCKING, False),
        (BLOCKING, True),
        (lc.methods.dilocox(4, "low_rank_int4", 1, first_round="blocking"), False),
    ],
    ids=["diloco", "delayed", "delayed, store away", "dilocox"],
)
def test_a_wait_that_is_stopped_behind_its_send_changes_no_number(store_party, method, away):
    data, paused = batches(10, 2), threading.Event()
    together = train(engine(method, 2), data)
    timing = dataclasses.replace(TIMING, deadline_s=20.0)  # a wait that goes on fails the test

    def job(region):
        others = store_party.region(region, 2, timing=timing)
        others.join(30.0)
        one, own = engine(method, 2, others), [rows(batch, region) for batch in data]
        state, _ = one.run(one.init(oracle.make_params()), own[:3])
        if region == 0:
            stops, reachable = iter([False] * 5), others.reachable
            others.stop_when(lambda: next(stops, True))
            others.reachable = lambda: not (away and one.carrier.flying) and reachable()
            state, history = one.run(state, own[3:4])
            assert one.carrier.paused and state.counters.behind == 1
            assert [event.kind for event in history.events] == ["send"]
            others.stop_when(lambda: False)
            others.reachable = reachable
            paused.set()
        assert paused.wait(60.0)
        state, _ = one.run(state, own[3 + (region == 0) :])
        at_end = values(state), values(one.finish(state))
        others.close(linger_s=0.0)
        return at_end

    with ThreadPoolExecutor(2) as pool, jax.numpy_dtype_promotion("standard"):
        jobs = list(pool.map(job, range(2)))
    assert_same(jobs, together, own_anchors=False)
