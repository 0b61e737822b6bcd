"""A state is compared with what all who train have had before anyone starts from it.

Here what regions have had travels with heartbeats; which of it counts: `test_kept_and_given.py`.
"""

import numpy as np
import pytest
from regions.faults import vanish
from regions.party import land, send, until

from lowcomm_jax.store.errors import Parted

STEP, NOW = 8, "8.2.0"


def anchor(word):
    return {"anchor": np.array([0, word], np.uint32)}


def asking(party, count, **options):
    """Regions of which the last one asks for a state, and the others know it."""
    regions = party.run(count, **options)
    regions[-1].want_state()
    until(lambda: all(x.state_transfer.asking().keys() == {count - 1} for x in regions[:-1]))
    return regions


def told_by(newcomer):
    """The regions that have told it of anchors."""
    return {r for r, beat in newcomer._context.heartbeat.latest().items() if beat.anchors}


@pytest.mark.parametrize("heal, heals", [("stop", False), ("majority", True)])
def test_a_state_is_compared_once_all_have_told_and_refused_where_it_differs(party, heal, heals):
    first, second, newcomer = asking(party, 3, heal=heal)

    def agrees(word, at_last=False):
        return newcomer.state_transfer.anchors_agree(STEP, NOW, anchor(word), at_last)

    assert not agrees(5)
    first.answer({"7.2.0": anchor(4), NOW: anchor(5)})
    second.answer({"7.2.0": anchor(4)})
    until(lambda: told_by(newcomer) == {0, 1})
    assert not agrees(5) and agrees(5, at_last=True)
    second.answer({NOW: anchor(5)})
    until(lambda: agrees(5))
    told = r"a state of step 8: region 0: anchor 0+5; region 1: anchor 0+5; region 2: anchor 0+6"
    with pytest.raises(Parted, match=told) as error:
        agrees(6)
    assert error.value.heals == heals


def without_the_first(regions):
    """An exchange in which the others wait no longer for the first region, but for one another."""
    others = regions[1:]
    send(others, "0")
    until(lambda: all(x._open["0"].has(y.region) for x in others for y in others))
    for x in others:
        x._context.pace.deadline_s = lambda nbytes, missed: 0.0
    land(others, "0")


def test_who_was_left_behind_gives_no_state_unless_it_is_the_last_one(party):
    """It has landed less than the others: the donor is the lowest of those who landed the last.

    At the end of a run, after which nobody exchanges any more, it may be the only one left.
    """
    first, second, third = regions = party.run(3, timing=None)
    without_the_first(regions)
    third.want_state()
    until(lambda: all(x.state_transfer.asking().keys() == {2} for x in (first, second)))
    assert second.state_transfer.owed()
    send([first], "0")
    land([first], "0")
    assert not first.state_transfer.owed()
    second.close(linger_s=0.0)
    until(lambda: not first.state_transfer.donors())
    assert first.state_transfer.owed()


def go_on(x, first, last):
    """Land so often, and tell of the newest anchors after each landing, as training loops do."""
    for n in range(first, last):
        x.answer({f"{m}.3.0": anchor(6) for m in range(max(first, n - 31), n + 1)})


@pytest.mark.parametrize("took", [5, 6])
def test_heartbeats_stay_small_however_often_the_others_land_meanwhile(store_party, took):
    """And a newcomer is told what it compares its state with, however late it looks."""
    first, second, newcomer = asking(store_party, 3)
    for x in (first, second):
        x.answer({NOW: anchor(5)})
        go_on(x, 9, 1009)
        assert len(x._context.heartbeat.own.anchors) == 64
    latest = newcomer._context.heartbeat.latest
    until(lambda: all("1008.3.0" in latest()[r].anchors for r in (0, 1)))

    def agrees():
        return newcomer.state_transfer.anchors_agree(STEP, NOW, anchor(took), at_last=False)

    assert not agrees(), "they may have had it, and tell of later ones alone"
    until(lambda: NOW in first._context.heartbeat.latest()[2].anchors)
    first.answer({"1009.3.0": anchor(6)})
    assert first._context.heartbeat.own.anchors[NOW] == {"anchor": f"{0:08x}{5:08x}"}
    assert len(first._context.heartbeat.own.anchors) == 65
    until(lambda: NOW in latest()[0].anchors)
    if took == 5:
        assert not agrees(), "the second one has not answered"
    until(lambda: NOW in second._context.heartbeat.latest()[2].anchors)
    second.answer({})
    until(lambda: NOW in latest()[1].anchors)
    if took == 5:
        assert agrees()
    else:
        with pytest.raises(Parted):
            agrees()


def test_a_region_that_takes_a_state_itself_forgets_what_it_has_had(store_party):
    first, *_ = asking(store_party, 3)
    first.answer({NOW: anchor(4)})
    first.want_state()
    first.come_in()
    first.answer({"9.2.0": anchor(6)})
    assert first._context.heartbeat.own.anchors.keys() == {"9.2.0"}


def test_what_an_earlier_job_has_told_says_nothing(store_party):
    first, second, newcomer = asking(store_party, 3)
    first.answer({NOW: anchor(4)})
    second.answer({NOW: anchor(5)})
    until(lambda: told_by(newcomer) == {0, 1})
    with pytest.raises(Parted):
        newcomer.state_transfer.anchors_agree(STEP, NOW, anchor(5), at_last=False)
    vanish(first)
    again = store_party.region(0, 3)
    again.join(20.0)
    until(lambda: newcomer._context.heartbeat.latest()[0].incarnation == 2)
    assert newcomer.state_transfer.anchors_agree(STEP, NOW, anchor(5), at_last=False)


def test_who_counts_as_dead_for_a_while_is_told_of_what_was_before(store_party, monkeypatch):
    """As in an outage while it asks: the state that it was given before is still compared."""
    *others, newcomer = asking(store_party, 3)
    for x in others:
        x.answer({NOW: anchor(5)})
    until(lambda: told_by(newcomer) == {0, 1})
    for x in others:
        with monkeypatch.context() as patched:
            patched.setattr(x.state_transfer, "asking", dict)
            x.answer({})
    until(lambda: not told_by(newcomer))
    for x in others:
        x.answer({"9.2.0": anchor(6)})
    until(lambda: newcomer.state_transfer.anchors_agree(STEP, NOW, anchor(5), at_last=False))
