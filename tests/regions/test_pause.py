"""Regions that stop together, and go on together later."""

import pytest
from regions.party import at_once, check, land, send

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
