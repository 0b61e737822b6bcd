"""Since when nobody has had a payload: from the first failure on, until some of it comes."""

import threading
from types import SimpleNamespace

import pytest
from regions.party import until

from lowcomm_jax.rounds.fetch import Fetch, PayloadPiece
from lowcomm_jax.store import wire
from lowcomm_jax.store.background import Background
from lowcomm_jax.store.commits import Job
from lowcomm_jax.store.errors import Lost, Missing, Rejected
from lowcomm_jax.store.records import Payload

FIRST, SECOND = (
    wire.pack("run", Job(1, 1), 1, {"x": wire.np.float32([number])}) for number in (1.0, 2.0)
)


class Scripted:
    """A transport and a clock: attempt by attempt, what comes at which second."""

    def __init__(self, attempts, cancel_at=None):
        self.attempts, self.seen, self.cancel_at = list(attempts), [], cancel_at
        self.heartbeat = SimpleNamespace(clock_s=0.0)
        self.fetch, self.ready = None, threading.Event()

    def get(self, *args):
        assert self.ready.wait(10.0)
        self.seen.append(self.fetch._missing_since_s)
        if len(self.seen) == self.cancel_at:
            self.fetch.cancel()
        self.heartbeat.clock_s, data = self.attempts.pop(0)
        if data is None:
            raise Missing("nobody has it")
        return data

    def keep(self, *args):
        pass


def fetched(attempts, pieces=(FIRST, SECOND), transferred=lambda nbytes: None, cancel_at=None):
    """(when it was missing since, as seen at each attempt but the first and at the end; clock)."""
    script = Scripted(attempts, cancel_at)

    def pauses():
        while script.attempts:
            yield 0.0
        script.fetch.cancel()
        yield 0.0

    context = SimpleNamespace(
        background=Background(pytest.fail),
        heartbeat=script.heartbeat,
        transport=script,
        run_id="run",
        store=SimpleNamespace(pauses=pauses, poll_s=(0.01, 0.01)),
        timing=SimpleNamespace(answer_s=2.0),
        counter=SimpleNamespace(add=lambda *_: None),
        fault_hooks=SimpleNamespace(received=lambda *_: None),
        pace=SimpleNamespace(transferred=lambda nbytes, seconds: transferred(nbytes)),
    )
    pieces = [PayloadPiece("k", Payload(wire.digest(x), len(x)), None, [1]) for x in pieces]
    script.fetch = Fetch(context, Job(1, 1), pieces)
    script.ready.set()
    until(lambda: not context.background._others(True), 10.0)
    return script.seen, script.fetch


def test_it_counts_from_the_first_failure():
    seen, fetch = fetched([(3.0, None), (5.0, None), (9.0, None)])
    assert seen == [None, 3.0, 3.0]
    assert fetch.missing_s == 9.0 - 3.0
    with pytest.raises(Lost):
        fetch.arrived()


def test_a_piece_that_comes_ends_it():
    """Whoever has a piece is there: the next one is looked for with patience of its own."""
    seen, fetch = fetched([(3.0, None), (5.0, FIRST), (7.0, None), (8.0, SECOND)])
    assert seen == [None, 3.0, None, 7.0]
    assert fetch.missing_s is None and fetch.complete


DAMAGED = FIRST[:-1] + b"!"


def test_a_payload_that_arrives_damaged_again_and_again_is_given_up_by_who_waits():
    """The fetch itself goes on: it may come whole from elsewhere."""
    seen, fetch = fetched([(1.0, DAMAGED), (2.0, DAMAGED)])
    assert seen == [None, 1.0] and not fetch.hopeless and not fetch.got
    _, fetch = fetched([(1.0, DAMAGED), (2.0, DAMAGED), (3.0, DAMAGED), (4.0, None)])
    assert fetch.hopeless and fetch.refused is None
    _, fetch = fetched([(1.0, DAMAGED)] * 3 + [(5.0, FIRST), (6.0, SECOND)])
    assert fetch.complete and fetch.missing_s is None


def test_what_does_not_fit_is_refused_for_good():
    other = wire.pack("another run", Job(1, 1), 1, {"x": wire.np.float32([1.0])})
    attempts = [(1.0, other), (2.0, SECOND)]
    _, fetch = fetched(attempts, pieces=(other, SECOND))
    assert isinstance(fetch.refused, Rejected) and fetch.hopeless and not fetch.got
    assert fetch.payload.digest == wire.digest(other) and not fetch.complete
    with pytest.raises(Rejected, match=r"payload of .*another run"):
        fetch.arrived()


@pytest.mark.parametrize(("clock_s", "gone"), [(6.9, False), (7.0, False), (7.1, True)])
def test_a_first_piece_is_waited_for_twice_as_long_as_an_answer(clock_s, gone):
    """Of which nobody has had anything since the third second; an answer takes two."""
    _, fetch = fetched([(3.0, None)])
    fetch._context.heartbeat.clock_s = clock_s
    if gone:
        with pytest.raises(Lost, match="payload of region 1 for 'k' is agreed on, but gone"):
            fetch.arrived()
    else:
        assert not fetch.arrived(), "it still waits"


def test_the_speed_of_all_pieces_is_noted_once():
    moved = []
    _, fetch = fetched(
        [(1.0, DAMAGED), (3.0, FIRST), (5.0, None), (9.0, SECOND)], transferred=moved.append
    )
    assert moved == [len(FIRST) + len(SECOND)] and fetch.complete


def test_who_is_cancelled_asks_no_more():
    attempts = [(1.0, None)] * 4
    seen, fetch = fetched(attempts, cancel_at=2)
    assert len(seen) == 2 and not fetch._context.background._others(True) and not fetch.complete
