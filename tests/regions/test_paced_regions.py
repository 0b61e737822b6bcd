"""What a region at a pace of its own reports, lands and takes back, decided without others."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regions.test_job_decisions import State

from lowcomm_jax.jobs import given_state, round_carrier
from lowcomm_jax.jobs.round_carrier import RoundCarrier
from lowcomm_jax.schedule import Arrivals, Learners
from lowcomm_jax.schedule.base import Adopt, Drop, Move, RoundsAgreed, Send, View, Wait
from lowcomm_jax.state.train_state import SyncCounters

RECORDS = RoundsAgreed(0, 0, 0, -1, -1, None, False, False)
"""Of region 0: nothing has landed, and no round is open."""


def view(flights=(), landed_at=(0, 0), last_sent=(-1, -1), away=False, **agreed):
    """Flights: (fragment, due) of each."""
    flying = [
        (f"{p}@{due}", SimpleNamespace(fragment=np.int64(p), due=np.array([due])))
        for p, due in flights
    ]
    counters = SimpleNamespace(
        last_landed=np.array(landed_at)[:, None], last_sent=np.array(last_sent)
    )
    return View(counters, flying, 1, away=away, agreed=RECORDS._replace(**agreed))


# -- learners: two fragments, a round every four ticks, tau = 6 -----------------------------------

LEARNERS = Learners(period=8, fragments=2, delay=6)


def sends(stage):
    assert all(isinstance(act, Send) for act in stage)
    return [act.fragments[0] for act in stage]


@pytest.mark.parametrize(
    ("agreed", "now", "reports"),
    [
        ({"since": 0}, 3, []),  # less than a period since it began
        ({"since": 0}, 4, [0]),
        ({"newest": 0, "since": 1}, 4, [0]),
        ({"newest": 0, "since": 4}, 4, [0]),  # seen only now: the next one is not due
        ({"newest": 1, "since": 1}, 4, [0, 1]),
        ({"newest": 1, "committed": 1, "since": 1}, 4, [1]),  # round 0 is over
        ({"landed": 1, "newest": 1, "committed": 1, "since": 1}, 5, [1, 0]),
        ({"landed": 1, "newest": 1, "committed": 1, "since": 1, "last": 2}, 5, [1]),
    ],
)
def test_what_a_learner_reports_to_and_opens(agreed, now, reports):
    assert sends(LEARNERS.acts_by_rounds(now, view(**agreed))) == reports
    assert LEARNERS.acts_by_rounds(now, view(away=True, **agreed)) == ()
    assert LEARNERS.acts_by_rounds(now, view(last_sent=(-1, now), **agreed)) == (), "once a step"


@pytest.mark.parametrize(
    ("now", "landed_at", "last", "flying", "can"),
    [
        (5, 0, None, (), True),
        (5, 5, None, (), False),  # no step since it landed
        (6, 5, None, (), True),
        (1, -1, None, (), True),
        (0, -1, None, (), False),  # before the first step
        (5, 0, 4, (), False),
        (5, 0, 5, (), True),
        (5, 0, None, ((0, 90),), False),  # it has reported
        (5, 0, None, ((1, 90),), True),
    ],
)
def test_to_which_round_a_learner_can_report(now, landed_at, last, flying, can):
    """Round 4, of fragment 0, is open."""
    given = {"landed": 4, "committed": 4, "newest": 4, "since": now, "last": last}
    seen = view(flying, (landed_at, 0), **given)
    assert (0 in sends(LEARNERS.acts_by_rounds(now, seen))) is can


def test_a_fragment_whose_last_round_has_not_landed_is_not_reported():
    seen = view(landed=4, committed=4, newest=6, since=5)
    assert sends(LEARNERS.acts_by_rounds(5, seen)) == [0, 1], "rounds 4 and 5, not 6"


@pytest.mark.parametrize(
    ("due", "newest", "now", "lands"),
    [(9, 3, 9, True), (9, 3, 8, False), (9, 4, 8, False), (9, 5, 3, True)],
)
def test_an_own_report_lands_after_tau_ticks_of_whoever_is_fastest(due, newest, now, lands):
    """Round 3 opens at tick 16, and round 5 at tick 24: more than six after it."""
    agreed = {"landed": 3, "committed": 4, "newest": newest, "since": now, "arrived": True}
    stage = LEARNERS.acts_by_rounds(now, view([(1, due)], **agreed))
    assert any(isinstance(act, Move) for act in stage) is lands
    if lands:
        move, adopt = stage
        assert (move, adopt[:2]) == (Move("1@9"), (1, "1@9")) and adopt.regions.tolist() == [True]


@pytest.mark.parametrize(("last", "arrived", "lands"), [(None, True, True), (3, True, False)])
def test_a_round_of_others_lands_and_is_adopted_until_the_last_of_the_run(last, arrived, lands):
    agreed = {"landed": 3, "committed": 4, "newest": 3, "since": 9, "last": last}
    stage = LEARNERS.acts_by_rounds(9, view([(0, 20)], arrived=arrived, **agreed))
    assert stage == () if not lands else [act.key for act in stage] == ["1@9+3"] * 2


# -- asynchronous methods: this region arrives after three steps ----------------------------------

ARRIVALS = Arrivals(period=6, speeds=(1.0, 2.0))


@pytest.mark.parametrize(
    ("now", "landed_at", "flying", "agreed", "sent"),
    [
        (2, 0, (), {}, []),
        (3, 0, (), {}, [0]),
        (3, -1, (), {}, [0]),
        (9, 6, (), {}, [0]),
        (9, 7, (), {}, []),
        (9, 0, (), {"landed": 4, "last": 4}, []),  # it has no round any more
    ],
)
def test_when_a_region_arrives(now, landed_at, flying, agreed, sent):
    seen = view(flying, (landed_at, 0), **agreed)
    if agreed.get("last") is None:
        assert ARRIVALS.acts_by_rounds(now, seen._replace(away=True)) == ()
    assert sends(ARRIVALS.acts_by_rounds(now, seen)) == sent


def test_whose_arrival_lands_adopts_and_who_has_no_round_takes_it_back():
    own = [(0, 9)]
    for ours, key in ((True, "0@9"), (False, "0@9+2")):
        move, adopt = ARRIVALS.acts_by_rounds(9, view(own, landed=2, arrived=True, ours=ours))
        assert (move, adopt.key) == (Move(key), key) and adopt.regions.tolist() == [ours]
    assert isinstance(adopt, Adopt)
    assert ARRIVALS.acts_by_rounds(9, view(own, landed=2, last=2)) == (Drop("0@9"),)
    assert ARRIVALS.acts_by_rounds(9, view(own, landed=2)) == (Wait(),), "it stands still"


# -- the carrier ----------------------------------------------------------------------------------


class Rounds:
    """Records of rounds, as the test sets them; calls are noted."""

    def __init__(self, committed=0, newest=-1):
        self.committed, self.newest, self.calls = committed, newest, []

    def seen(self):
        return self.committed, self.newest

    def report(self, number, arrays, terms, step):
        self.calls.append((number, step))

    def go_on(self, first):
        self.calls.append(("go on", first))
        self.committed, self.newest = first, first - 1


@pytest.fixture
def carrier(monkeypatch):
    """Of two fragments."""
    monkeypatch.setattr(round_carrier, "arrays_to_send", lambda flight: {})
    made = object.__new__(RoundCarrier)
    made.rounds, made.landed, made.last, made._count = Rounds(newest=4), 0, None, 2
    made._ended = made._stands_still = False
    made._committed, made.newest, made._since = 0, 4, 0
    made._reported = np.array(-1)
    made._terms = lambda loop, state, number: {}
    made.exchanges = SimpleNamespace(region=1)
    return made


def sent(step, fragment):
    return SimpleNamespace(sent=np.int64(step), fragment=np.int64(fragment), takes_part=np.ones(1))


def test_a_restored_learner_reports_again_in_the_order_of_its_reports(carrier):
    """Each to the round of its fragment that it has reported to last."""
    state = State(in_flight={"0@7": sent(7, 0), "1@5": sent(5, 1)}).at(8)
    state.counters.sends = np.array([3, 2])
    carrier.reconnect(None, state)
    assert carrier.rounds.calls == [(3, 5), (4, 7)] and carrier._since == 8


@pytest.mark.parametrize(("landed", "last", "read"), [(0, 2, 5), (2, 2, 0), (3, 2, 0)])
def test_batches_are_read_until_so_many_rounds_have_landed(
    carrier, monkeypatch, landed, last, read
):
    """The one with which the last round lands is the last one that is read."""
    monkeypatch.setattr(round_carrier, "rounds_landed", lambda state: landed)
    seen, stream = [], iter(range(100))
    for batch in carrier.until_rounds(State(), last, stream):
        seen.append(batch)
        if batch == 4:
            carrier.landed = last
    assert seen == list(range(read))
    assert next(stream) == (read if read else 1), "of none that is not trained on but one"


def test_a_run_ends_with_its_last_round_and_may_go_on_with_the_next_numbers(carrier, monkeypatch):
    monkeypatch.setattr(round_carrier, "rounds_landed", lambda state: 6)
    carrier.exchanges = SimpleNamespace(ended_before=lambda state: False)

    def ends(state):
        with carrier.ending(None, state) as last:
            assert not carrier._ended, "what a paused step has still to do is of rounds"
        assert last is carrier.exchanges
        return carrier._ended

    for last, in_flight in ((7, {}), (6, {"a": None})):
        carrier.last = last
        with pytest.raises(ValueError, match=f"6 rounds have landed here, of {last}"):
            ends(State(in_flight=in_flight))
    carrier.last = 6
    assert ends(State())
    carrier._begin(None, State().at(41))
    assert carrier.rounds.calls == [("go on", 6)] and not carrier._ended
    assert (carrier._committed, carrier.newest, carrier._since) == (6, 5, 40)
    carrier.last, carrier.exchanges.ended_before = None, lambda state: True
    assert ends(State()), "the others have ended without this region"


@dataclasses.dataclass
class Inner:
    opt: optax.ScaleByScheduleState
    tokens: jax.Array
    step: jax.Array


def test_who_copies_a_peer_has_the_learning_rate_of_the_peers_step(monkeypatch):
    """Of asynchronous methods; all else of the optimizer is as at the beginning."""
    adopted = []

    class Loop:
        method = SimpleNamespace(base="received", schedule=SimpleNamespace(by_rounds=True))

        def adopt(self, state, p, flight, adopts, now):
            adopted.append((p, int(flight.sent), adopts.tolist(), now))
            return state

    @dataclasses.dataclass
    class Copied(State):
        inner: Inner = None
        anchor: int = 0
        outer: int = 0
        merge: int = 0
        rate: int = 0

    monkeypatch.setattr(given_state, "placed_like", lambda trees, *_: trees)
    opt = optax.ScaleByScheduleState(np.zeros(1, np.int32))
    inner = Inner(opt, jnp.ones((1, 1)), jnp.zeros(1, jnp.int32))
    counters = {"step": np.int64(7), "last_sent": np.array([7]), "sends": np.array([4])}
    arrays = {f"counters/{name}": x for name, x in counters.items()}
    mine = Copied(SyncCounters.start(1, 1), inner=inner)
    got = given_state.start_from_peer(Loop(), mine, arrays, {"in_flight": [{"fragment": 0}]})
    assert got.inner.opt.count.tolist() == [7] and adopted == [(0, 7, [True], 7)]
    assert got.counters.sends.tolist() == [3] and got.inner.step.tolist() == [7]
