"""A region that comes in while another one, which was cut off, catches up."""

from types import SimpleNamespace

import pytest

from lowcomm_jax.recovery.rejoin import come_in


class Elsewhere:
    """All that was due up to step `done` is done; the other region has made `made` steps."""

    def __init__(self, done, made):
        self.done, self.made, self.told = done, made, []
        self.exchange = SimpleNamespace(
            come_in=lambda: self.told.append("comes in"),
            wait_for_beats=self.beat,
            frontier=lambda done=False: self.done if done else self.made,
        )
        self.group_size = 2  # else it lands first what the other one has made

    def beat(self):
        self.told.append("beat")


def at(step):
    return SimpleNamespace(counters=SimpleNamespace(step=step))


@pytest.mark.parametrize(("done", "ends"), [(576, 576), (580, 580)])
def test_it_lands_what_is_done_elsewhere_and_waits_for_no_more(done, ends):
    """What is due between 580 and 700 the other one does with it: each would wait for the other."""
    there = Elsewhere(done, 700)

    state = come_in(there, at(576), lambda state, step: at(step), lambda state: False)
    assert state.counters.step == ends and there.told == ["comes in", "beat"]


def test_it_goes_on_while_it_is_passed_over():
    there, over = Elsewhere(576, 576), [True, True, False]

    def passed_over(state):
        there.done += 2 * over[0]
        return over.pop(0)

    state = come_in(there, at(576), lambda state, step: at(step), passed_over)
    assert state.counters.step == 580 and there.told == ["comes in", *["beat"] * 3]
