"""Since when nobody has had a payload: from the first failure on, until some of it comes."""

import threading
from types import SimpleNamespace

import pytest

from lowcomm_jax.runtime import wire
from lowcomm_jax.runtime.commits import PayloadRecord
from lowcomm_jax.runtime.errors import Missing
from lowcomm_jax.runtime.fetch import Fetch, PayloadPiece

FIRST, SECOND = (
    wire.pack("run", "k", 1, {"x": wire.np.float32([number])}) for number in (1.0, 2.0)
)


class Scripted:
    """A transport and a clock: attempt by attempt, what comes at which second."""

    def __init__(self, attempts):
        self.attempts, self.seen = list(attempts), []
        self.heartbeat = SimpleNamespace(clock_s=0.0, run_guarded=lambda act: act())
        self.fetch, self.done = None, threading.Event()

    def get(self, *args):
        if self.fetch is not None:
            self.seen.append(self.fetch._missing_since_s)
        self.heartbeat.clock_s, data = self.attempts.pop(0)
        if data is None:
            raise Missing("nobody has it")
        return data

    def keep(self, *args):
        pass


def fetched(attempts):
    """(when it was missing since, as seen at each attempt but the first and at the end; clock)."""
    script, ready = Scripted(attempts), threading.Event()

    def pauses():
        ready.wait(10.0)
        while script.attempts:
            yield 0.0

    context = SimpleNamespace(
        heartbeat=script.heartbeat,
        transport=script,
        run_id="run",
        store=SimpleNamespace(pauses=pauses, poll_s=(0.01, 0.01)),
        timing=SimpleNamespace(answer_s=2.0),
        counter=SimpleNamespace(add=lambda *_: None),
        fault_hooks=SimpleNamespace(received=lambda *_: None),
        pace=SimpleNamespace(transferred=lambda *_: None),
    )
    pieces = [
        PayloadPiece("k", "k", PayloadRecord(wire.digest(x), len(x)), None, [1])
        for x in (FIRST, SECOND)
    ]
    script.fetch = Fetch(context, 1, pieces)
    ready.set()
    script.fetch._thread.join(10.0)
    return script.seen, script.fetch


def test_it_counts_from_the_first_failure():
    seen, fetch = fetched([(3.0, None), (5.0, None), (9.0, None)])
    assert seen == [None, 3.0, 3.0]
    assert fetch.missing_s == 9.0 - 3.0
    with pytest.raises(Missing):
        fetch.first(lambda: None)


def test_a_piece_that_comes_ends_it():
    """Whoever has a piece is there: the next one is looked for with patience of its own."""
    seen, fetch = fetched([(3.0, None), (5.0, FIRST), (7.0, None), (8.0, SECOND)])
    assert seen == [None, 3.0, None, 7.0]
    assert fetch.missing_s is None and fetch.complete
