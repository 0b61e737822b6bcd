"""What the processes of a returning region but its first one do: they take the leader's answers."""

import sys
from types import SimpleNamespace

import pytest

from lowcomm_jax.jobs import job_carrier
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.rounds import membership
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.store.errors import Lost


class Second:
    """The leader, as the second process of a job sees it."""

    leads, count, index = False, 2, 1

    def __init__(self):
        self.answers = {"one gave its state": (7, {}, {}), "they told of their anchors": True}

    def everyones(self, what, value):
        return [value] * self.count

    def broadcast_from_leader(self, what, act):
        return self.answers.get(what)


@pytest.fixture
def second(monkeypatch):
    second = Second()
    for module in (sys.modules["lowcomm_jax.mesh.leader"], membership, job_carrier):
        monkeypatch.setattr(module, "leader", lambda: second)
    return second


@pytest.fixture
def exchange(second):
    return RemoteExchange(0, 2, "stop", lambda: pytest.fail("the first one alone"), 4)


def test_a_state_is_taken_from_the_leader(exchange):
    assert rejoin.newest(exchange) == (7, {}, {})


def test_anchors_are_compared_by_the_leader(exchange, monkeypatch):
    monkeypatch.setattr(rejoin, "anchor_version", lambda state: "3.1")
    history = SimpleNamespace(
        note=lambda *_: None, terms=lambda *_: {"anchor": "5"}, shared=True, past={}
    )
    carrier = SimpleNamespace(exchange=exchange, anchor_history=history)
    loop = SimpleNamespace(fragments=None)
    state = SimpleNamespace(anchor={}, counters=SimpleNamespace(step=3))
    rejoin._compare(carrier, loop, state)


def test_nobody_left_is_told_to_all(exchange, second):
    def lost(what, act):
        raise Lost(what)

    second.broadcast_from_leader = lost
    with pytest.raises(Lost):
        rejoin.newest(exchange)
