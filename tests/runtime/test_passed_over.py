"""A region that comes in while an exchange is under way, which some confirm without it."""

import threading
import time
from types import SimpleNamespace

import pytest
from runtime.party import check, land, send, until

from lowcomm_jax import exchange
from lowcomm_jax.runtime.commits import Commit
from lowcomm_jax.runtime.heartbeat import Beat, WaitList
from lowcomm_jax.runtime.request import ExchangeResult


def hold(commit_log, seen):
    """Let it commit no sooner."""
    commit = commit_log.commit

    def held(*args):
        assert seen.wait(30)
        return commit(*args)

    commit_log.commit = held


def test_who_waits_for_it_does_so_no_longer_and_it_learns_of_that(party):
    regions = party.run(3, timing=exchange.Timing(beat_s=0.2, dead_after_s=30, deadline_s=60))
    # It has not read yet that region 2 is there.
    regions[1]._wait_list.awaited = lambda region: region != 2
    seen = threading.Event()
    for region in regions[:2]:
        hold(region._context.commit_log, seen)
    assert not regions[2].passed_over("k")
    began = time.monotonic()
    send(regions[:2], "k")
    until(lambda: regions[2].passed_over("k"))
    seen.set()
    for arrived in land(regions[:2], "k"):
        check(arrived, 3, [0, 1])
    assert not regions[2].passed_over("k"), "it is over"
    assert time.monotonic() - began < 30, "region 0 has waited for what cannot count"


@pytest.mark.parametrize("vain, told", [(False, False), (True, False), (True, True)])
def test_only_who_was_waited_for_can_be_left_behind(vain, told):
    """Not one that has come to where the others are, and was first read of just now; nor one that
    the writer of the record has heard and we have not yet: it has announced its absence."""
    beats = {r: Beat(incarnation=1, step=6, awaited=True) for r in range(3)}
    heartbeat = SimpleNamespace(
        region=0, own=beats[0], latest=lambda: beats, living=lambda certain: {0, 1, 2}
    )
    waiting = WaitList(heartbeat)
    commit, heard = Commit({}, {2: {}} if told else {}, 1, (0, 1)), frozenset({0, 1})
    waiting.note({1, 2}, ExchangeResult(commit, {}, heard, frozenset({2} if vain else ()), 0.1))
    assert waiting.awaited(1) and waiting.awaited(2) == (told or not vain)
