"""What a region at a pace of its own tells of its anchor, and of having copied a peer."""

from types import SimpleNamespace

import jax
import oracle
import pytest
from regions.learners import R, method
from regions.together import engine

from lowcomm_jax import exchange
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.store import terms
from lowcomm_jax.store.errors import Parted


def test_whose_anchor_is_another_is_found_out_by_the_rounds_of_that_fragment(tmp_path):
    """Leaf "a" is fragment 0 of three: rounds 0, 3, ..."""
    one = engine(method(), R, exchange.store(f"file://{tmp_path}", 0, R, "run"))
    with jax.numpy_dtype_promotion("standard"):
        state = one.init(oracle.make_params())
        odd = state.replace(anchor={**state.anchor, "a": state.anchor["a"] + 1e-6})
        loop = one.sync_loop(state)
        told = [
            dict(enumerate(terms.as_record(loop.carrier._terms(loop, x, n)) for x in (state, odd)))
            for n in range(4)
        ]
    for number, of_both in enumerate(told):
        assert (of_both[0]["round"], of_both[0]["fragment"]) == (number, number % 3)
        if number % 3:
            terms.check(f"round {number}", of_both, 1, of_both[1], "stop")
        else:
            with pytest.raises(Parted, match=f"round {number}"):
                terms.check(f"round {number}", of_both, 1, of_both[1], "stop")


class Copies:
    """The carrier and exchange of a region that comes back; its calls are noted."""

    def __init__(self):
        self.calls = []
        self.exchange = self

    def position(self, state):
        return state.landed

    def beat(self, position):
        self.calls.append(("is at", position))

    def come_in(self):
        self.calls.append("comes in")


@pytest.fixture(autouse=True)
def copied(monkeypatch):
    def copy(loop, state, arrays, document):
        return SimpleNamespace(own=state, of=(arrays, document), landed=arrays["landed"])

    monkeypatch.setattr(rejoin, "start_from_peer", copy)


def test_who_has_copied_a_peer_tells_its_round_and_then_is_waited_for():
    region = Copies()
    given = 5, {"landed": 5}, {"of": "a peer"}
    state = rejoin._copy_peer(region, None, "its own", given, ended=False)
    assert region.calls == [("is at", 5), "comes in"]
    assert (state.own, state.of) == ("its own", ({"landed": 5}, {"of": "a peer"}))


def test_who_takes_the_result_of_those_that_have_ended_waits_for_nobody():
    """A run that is over has no rounds to come in to."""
    region = Copies()
    given = 9, {"landed": 9}, {"of": "the end"}
    state = rejoin._copy_peer(region, None, "its own", given, ended=True)
    assert region.calls == [("is at", 9)] and state.of == ({"landed": 9}, {"of": "the end"})
