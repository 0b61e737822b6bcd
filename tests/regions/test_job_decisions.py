"""What a job defers, catches up with, reports and lands: decided step by step, without others."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from lowcomm_jax.jobs import job_carrier
from lowcomm_jax.jobs.job_carrier import JobCarrier, OutagePacing, PendingExchange, _due_until
from lowcomm_jax.rounds import job_traffic
from lowcomm_jax.rounds.job_traffic import JobTraffic
from lowcomm_jax.rounds.request import Arrived, arrange
from lowcomm_jax.schedule import Adaptive, Staggered
from lowcomm_jax.schedule.base import Move, Send
from lowcomm_jax.state.train_state import InFlight
from lowcomm_jax.store.errors import Parted, StoreUnavailable
from lowcomm_jax.sync.carrier import Collected
from lowcomm_jax.sync.sync_loop import SyncLoop

ME, NOBODY = np.array([True]), np.array([False])


@dataclasses.dataclass
class Counters:
    """What the loop reads of `SyncCounters`, of two fragments."""

    step: int = 0
    behind: int = 0
    last_sent: np.ndarray = dataclasses.field(default_factory=lambda: np.array([-1, -1]))
    last_landed: np.ndarray = dataclasses.field(default_factory=lambda: np.array([[0], [0]]))
    sends: np.ndarray = dataclasses.field(default_factory=lambda: np.array([2, 1]))
    decided: dict = dataclasses.field(default_factory=dict)

    @property
    def done_until(self):
        return self.step - self.behind

    def copy(self):
        return dataclasses.replace(self, last_sent=self.last_sent.copy())


@dataclasses.dataclass
class State:
    counters: Counters = dataclasses.field(default_factory=Counters)
    in_flight: dict = dataclasses.field(default_factory=dict)
    anchor: dict = dataclasses.field(default_factory=dict)
    outer: tuple = ((), ())
    codec: tuple = ("of fragment 0", "of fragment 1")

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    def at(self, step):
        """The state when so many steps are made, with nothing of the last ones done."""
        behind = step - self.counters.done_until
        return self.replace(counters=dataclasses.replace(self.counters, step=step, behind=behind))


def method(shared=True, group_size=None, by_rounds=False):
    """What a carrier reads of a method."""
    schedule = SimpleNamespace(by_rounds=by_rounds, most=None)
    topology = None if group_size is None else SimpleNamespace(group_size=group_size)
    anchors = "shared" if shared else "each"
    return SimpleNamespace(schedule=schedule, topology=topology, anchors=anchors)


class Exchange:
    """The exchange of region 1 of three, with given answers."""

    count, region = 3, 1

    def __init__(self, **answers):
        for name, answer in answers.items():
            setattr(self, name, answer)


class Notes(Exchange):
    """An exchange that notes its calls."""

    def __init__(self, reachable=True):
        self.calls, self.is_reachable, self.known = [], reachable, 9

    def reachable(self):
        return self.is_reachable

    def fetch_ahead(self, first, count, missed):
        self.calls.append(("fetch_ahead", first, count, missed))
        return self.known

    def answer(self, versions):
        """Nobody asks."""

    def __getattr__(self, name):
        return lambda *given, **more: self.calls.append((name, *given, *more.values()))


class Asked(JobCarrier):
    """A carrier that notes how patient it is in each stage."""

    def reach(self, loop, state, stage, begun):
        reached = super().reach(loop, state, stage, begun)
        loop.patience.append(self._patience_s)
        return reached


class Loop(SyncLoop):
    """Events are due after every third step, and done while the others can be reached."""

    def __init__(self, reachable=True):
        self.exchange = Notes(reachable)
        self.carrier = Asked(self.exchange, method(shared=False))
        self.asked, self.done, self.over = [], [], 0
        self.sends, self._quiet = lambda step: True, (None, None, None, 0)
        self.schedule, self.fragments, self.count = Staggered(6, 2), None, 1
        self.by_rounds, self.patience = False, []

    @property
    def pacing(self):
        return self.carrier.pacing

    def acts(self, state, step, crossed=False, away=None):
        if step % 3 or self.over == step:
            return ()
        if away is not None:  # not only asked when it is due
            self.asked.append((step, not away, int(state.counters.behind)))
        return (Send((0,)),)

    def do(self, state, stage, mask, in_time, events):
        counters = state.counters.copy()
        self.over = int(counters.step)
        self.done.append((self.over, bool(mask[0]), in_time))
        if self.sends(counters.step):
            counters.last_sent[0] = counters.step
            counters.sends = np.add(counters.sends, [1, 0])
        return state.replace(counters=counters)

    def calls(self):
        """What was asked of the exchange, but for telling of progress."""
        return [call for call in self.exchange.calls if call[0] != "beat"]


def test_what_is_due_is_done_with_the_others():
    loop = Loop()
    state = loop.run_due(State().at(2), ME, [])
    assert loop.done == [] and state.counters.behind == 0
    assert loop.exchange.calls == [("beat", None, 2)]
    state = loop.run_due(state.at(3), ME, [])
    assert loop.asked == [(3, True, 1)] and loop.done == [(3, True, True)] and loop.calls() == []
    assert (state.counters.step, state.counters.behind, loop.pacing.first) == (3, 0, None)


def test_what_is_due_while_nobody_can_be_reached_is_made_up_for_as_if_absent():
    loop = Loop(reachable=False)
    state = loop.run_due(State().at(3), ME, [])
    assert state.counters.behind == 1 and loop.pacing.first[0] == 3
    assert loop.exchange.calls == [("stopped",), ("beat", 3)]
    for step in (4, 8):
        state = loop.run_due(state.at(step), ME, [])
        assert (state.counters.step, state.counters.behind) == (step, step - 3 + 1)
    assert loop.asked[1:] == [(3, False, 1)] * 2 and loop.pacing.last[0] == 8
    assert loop.done == []
    loop.asked.clear(), loop.exchange.calls.clear(), loop.patience.clear()
    loop.exchange.is_reachable = True
    loop.carrier.pacing = SimpleNamespace(first=(3, 0.0), patience_s=lambda steps: 10.0 * steps)
    state = loop.run_due(state.at(9), ME, [])
    assert loop.asked == [(3, False, 1), (6, False, 1), (9, True, 1)]
    assert loop.done == [(3, False, False), (6, False, False), (9, True, True)]
    assert state.counters.behind == 0
    assert loop.calls() == [("fetch_ahead", 4, 3, 2)]
    # By the steps since that of the first deferral.
    assert loop.patience == [10.0, 30.0, 30.0] and loop.carrier._patience_s == 0.0
    assert loop.pacing == OutagePacing()


@pytest.mark.parametrize("sends", [3, 6])
def test_only_who_sends_in_time_has_caught_up(sends):
    """Not who made up for a send, nor who has only landed something."""
    loop = Loop()
    loop.sends = lambda step: step == sends
    loop.pacing.deferred(3)
    loop.run_due(State().at(6), ME, [])
    assert [step for step, *_ in loop.done] == [3, 6]
    assert (loop.pacing == OutagePacing()) is (sends == 6)


@pytest.mark.parametrize(
    ("deferred", "reachable", "step", "ahead"),
    [
        (True, True, 4, True),
        (False, True, 4, False),
        (True, False, 4, False),
        (True, True, 3, False),
    ],
)
def test_what_was_missed_is_read_at_once_where_it_can_be(deferred, reachable, step, ahead):
    loop = Loop(reachable)
    if deferred:
        loop.pacing.deferred(3)
    loop.run_due(State().at(step), ME, [])
    names = [name for name, *_ in loop.exchange.calls]
    assert ("fetch_ahead" in names) is ahead


@pytest.mark.parametrize(
    ("known", "asked"), [(9, [3]), (1, [3, 4, 5]), (0, [3, 4, 5]), (2, [3, 5])]
)
def test_more_is_read_ahead_once_what_was_read_is_done(known, asked):
    """But never for the step of now: in its sends this region has a part."""
    loop = Loop()
    loop.pacing.deferred(3)
    loop.exchange.known = known
    loop.run_due(State().at(12), ME, [])
    calls = [call for call in loop.exchange.calls if call[0] == "fetch_ahead"]
    assert [first - 1 for _, first, *_ in calls] == asked
    steps = [3 + 3 * (sends - 3) for sends in asked]  # an event, with a send, every third step
    assert [given for _, _, *given in calls] == [
        [(12 - at) // 3 + 1, (12 - at) // 3] for at in steps
    ]


@pytest.mark.parametrize(
    ("step", "sent", "now", "missed"),
    [
        (3, -1, 3, 0),  # fragments leave after 3, 9, ... and 6, 12, ...
        (3, -1, 4, 1),
        (3, -1, 13, 4),
        (6, 3, 13, 3),
        (9, -1, 13, 2),
        (3, 3, 13, 3),  # it has left, and the step is not done
    ],
)
def test_sends_that_were_missed(step, sent, now, missed):
    loop, state = Loop(), State(Counters(step=step, last_sent=np.array([sent, -1])))
    assert _due_until(loop, state, now) == missed
    loop.schedule = Adaptive(6, 2, 1, 1)
    assert _due_until(loop, state, now) == now - step


def test_what_was_read_ahead_is_let_go_of_once_it_is_done():
    loop = Loop()
    loop.exchange.known = 2
    loop.pacing.deferred(3)
    state = loop.run_due(State().at(6), ME, [])
    assert ("forget_ahead",) not in loop.calls()
    loop.run_due(state.at(9), ME, [])
    assert loop.calls()[1:] == [("forget_ahead",)]


def test_what_is_in_flight_is_kept_and_read_by_who_only_listens_to_it():
    """It takes a payload where that lands, which may be after later sends."""
    loop, flight = Loop(), SimpleNamespace(anchor_updated=False)
    loop.exchange.known, loop.exchange.frontier = 2, lambda: 12
    with loop.carrier.acting(defers=False, sends=False):
        state = State(in_flight={"a": flight}).at(3)  # sent before the third of three sends
        loop.carrier._comes_to(loop, state)
        assert loop.calls() == [("fetch_ahead", 3, 1 + 4, 0)]
        state.counters.sends = np.add(state.counters.sends, [1, 0])
        loop.carrier._comes_to(loop, state)  # two of four have landed: the third is still read
        assert loop.calls()[1:] == []
        flight.anchor_updated = True
        loop.carrier._comes_to(loop, state)
    assert loop.calls()[1:] == [("forget_ahead",), ("fetch_ahead", 5, 4, 0)]


@pytest.mark.parametrize("frontier", [12, 6, 3])
def test_who_comes_in_reads_ahead_what_the_others_have_landed(frontier):
    """It says of none that it has no part in it: nobody waits for it."""
    loop = Loop()
    loop.exchange.frontier = lambda: frontier
    with loop.carrier.acting(defers=False, sends=False):
        loop.run_due(State().at(6), NOBODY, [])
    ahead = [call for call in loop.calls() if call[0] == "fetch_ahead"]
    assert ahead == [("fetch_ahead", 4, frontier // 3, 0)] * (frontier > 3)


@pytest.mark.parametrize("lands", [False, True])
def test_a_send_needs_the_others_and_a_landing_its_payloads(lands):
    """What cannot be done is put off, and the others are told how far this region is."""
    asked = []
    exchange = Exchange(
        beat=lambda trained: asked.append(("trained", trained)),
        reachable=lambda: asked.append("reach"),
        ready=lambda name: asked.append(name),
        stopped=lambda: False,
        fetch_ahead=lambda *_: 0,
    )
    carrier = JobCarrier(exchange, method(shared=False))
    carrier._trained, carrier._pending["a"] = 5, pending()
    stage = (Move("a"), Move(None, "b")) if lands else (Send((0,)),)
    loop = SimpleNamespace(schedule=Staggered(5 if lands else 4), fragments=None, count=1)
    assert not carrier.reach(loop, State().at(4), stage, False)
    assert asked == [*["7"] * lands, "reach", ("trained", 5)] and carrier.pacing.first[0] == 5
    exchange.reachable, exchange.ready = (lambda: True), (lambda name: True)
    assert carrier.reach(loop, State().at(4), stage, False) and asked[2 + lands :] == []


def test_a_wait_that_was_stopped_puts_nothing_off():
    """The step is done later, and in time."""
    exchange = Exchange(ready=lambda name: False, reachable=lambda: False, stopped=lambda: True)
    carrier = JobCarrier(exchange, method(shared=False))
    carrier._pending["a"] = pending()
    loop = SimpleNamespace(schedule=Staggered(5), fragments=None, count=1)
    assert not carrier.reach(loop, State().at(4), (Move("a"),), False)
    assert carrier.paused and carrier.pacing.first is None


class Carries(JobCarrier):
    """Notes what is posted."""

    def __init__(self):
        super().__init__(Exchange(), method())
        self.started = []

    def post(self, loop, state, key, flight, again=False):
        number = state.counters.sends_until(flight.sent)
        self.started.append((key, number, again, self.role.sends))


def sent(step, fragment=0, takes_part=ME, kept=(), moved=False):
    more = {"takes_part": takes_part, "kept": kept, "anchor_updated": moved}
    return SimpleNamespace(sent=step, fragment=fragment, **more)


def test_what_is_in_flight_is_started_again_in_the_order_of_the_sends():
    """But for what has landed and waits for regions alone."""
    carrier, state = Carries(), State()
    state.counters.sends_until = lambda step: 10 + step
    state.in_flight = {"b": sent(5), "a": sent(7), "c": sent(2), "d": sent(3, moved=True)}
    carrier.reconnect(None, state)
    assert carrier.started == [("c", 12, True, True), ("b", 15, True, True), ("a", 17, True, True)]
    state.in_flight = {"a": sent(5, takes_part=NOBODY, kept=None)}
    carrier.reconnect(None, state)
    state.in_flight = {"a": sent(5, kept=None)}
    with pytest.raises(ValueError, match="'a' is in flight without the codec's state"):
        carrier.reconnect(None, state)


def test_a_role_ends_whatever_happens():
    carrier = Carries()
    with pytest.raises(ZeroDivisionError), carrier.acting(sends=False, defers=False):
        assert carrier.role == (False, False, False)
        with carrier.acting(holds=True):
            assert carrier.role == (False, False, True)
        1 / 0  # noqa: B018
    assert carrier.role == (True, True, False)


@pytest.mark.parametrize(("counted", "all_were"), [((1, 1, 1), True), ((1, 0, 1), False)])
def test_it_is_noted_who_was_counted_and_whether_it_is_adopted(counted, all_were):
    state, seen, taking_part = State(), [], np.array(counted, bool)
    state.counters.counted = np.array([False, not all_were])
    state.counters.sends, state.in_flight = np.array([0, 16]), {"k": in_flight(5, 1)}
    arrays = {"weight": np.ones(3, np.float32), "header/x": np.arange(3)}
    arrived = Arrived(taking_part, True, arrays, None, 0.0, 0.0)
    exchange = Exchange(ready=lambda name: True, finish=lambda name: arrived)
    carrier = JobCarrier(exchange, method())

    def collect(adopts, last):
        carrier._pending["k"] = pending()
        return carrier.collect(None, state, "k", last, adopts)

    after, collected = collect(True, False)
    assert after is state and collected.flight.takes_part.tolist() == taking_part.tolist()
    assert collected.flight.weight.tolist() == list(counted)
    assert state.counters.counted.tolist() == [False, all_were]
    carrier.witness = seen.append
    for adopts, last in ((True, False), (True, True), (False, False)):
        collect(adopts, last)
        one = seen.pop()
        assert one[:4] == (1, 5, 15, last) and one.counted_N.tolist() == list(map(bool, counted))
        assert one.adopted is adopts and one.header["x"].tolist() == [0, 1, 2]


def in_flight(step, fragment=0, mask=ME):
    """A payload without arrays."""
    due, none = np.full(1, step + 1), np.zeros(1, np.float32)
    numbers = {"fragment": fragment, "sent": step, "due": due, "level": 0, "header": {}}
    return InFlight({}, None, mask, none, takes_part=mask, anchor_updated=False, **numbers)


def pending(members=(0, 1, 2), sends=True):
    return PendingExchange("7", {}, members, sends, None)


@pytest.mark.parametrize(
    ("members", "group_size"), [((0, 1), 2), ((0, 1, 2), 3), ((0, 1, 2), None)]
)
def test_who_only_listens_waits_for_all_but_not_for_a_group(members, group_size, monkeypatch):
    """Its members may never exchange: then nothing has come of it, nobody is counted or told."""
    like, heard, seen = {"weight": ("float32", ())}, [], []

    def start(name, arrays, joins, **how):
        assert set(arrays) == set(like) and not joins and how["members"] == members
        heard.append(name)

    monkeypatch.setattr(job_carrier, "wait_for_donors", lambda exchange, name, look: look())
    everyone = group_size is None
    finish, ready = (lambda name: arrange({}, like, 3)), lambda name: True
    exchange = Exchange(start=start, ready=ready, finish=finish)
    carrier = JobCarrier(exchange, method(group_size=group_size))
    carrier._pending["k"], carrier.witness = pending(members, False), seen.append
    loop = SimpleNamespace(fragments=SimpleNamespace(like=lambda p: {"w": np.zeros(2)}))
    state = State(in_flight={"k": in_flight(3, mask=NOBODY)})
    state.counters.counted = np.array([True, True])
    _, (got, draw, *_) = carrier.collect(loop, state, "k", False, True)
    assert heard == ["7"] * everyone and len(seen) == everyone and "k" not in carrier._pending
    assert got.takes_part.tolist() == [False] * len(members) and not got.weight.any()
    if everyone:
        assert draw is None
    else:  # the rows of the landing with gossip, in which nobody sent an anchor
        assert {name: (x.dtype, x.shape) for name, x in draw.anchors.items()} == {
            "w": (np.float32, (len(members), 2))
        }


@pytest.mark.parametrize(
    ("reachable", "ready", "role", "arrives"),
    [
        (True, False, {}, True),
        (False, False, {}, False),
        (False, True, {}, True),  # it is here already
        (False, False, {"defers": False}, True),
        (True, True, {"holds": True}, False),
    ],
)
def test_what_can_be_landed_now(reachable, ready, role, arrives):
    exchange = Exchange(
        reachable=lambda: reachable,
        ready=lambda name: ready,
        arrives=lambda name, answers: True,
    )
    carrier = JobCarrier(exchange, method(shared=False))
    carrier._pending = {"k": pending(), "heard": pending(sends=False)}
    state = SimpleNamespace(inner=SimpleNamespace(params={}))
    loop = SimpleNamespace(fragments=None)
    with carrier.acting(**role):
        assert carrier._arrive(loop, state, ["k"]) is arrives
        assert carrier._arrive(loop, state, ["heard"])
        assert carrier._arrive(loop, state, ["other"])


def test_a_wait_goes_on_once_who_asked_is_answered_also_where_it_has_died_meanwhile():
    """Else what is due would be put off, as if the store were away."""
    outcomes, owes, given = [None, None, True], [True, False], []
    exchange = Exchange(
        reachable=lambda: True,
        ready=lambda name: False,
        arrives=lambda names, answers: outcomes.pop(0),
        answer=lambda versions: owes.pop(0),
        give_state=lambda *state: given.append(state),
    )
    carrier = JobCarrier(exchange, method(shared=False))
    carrier.given, carrier._pending["k"] = (lambda state: ("a state",)), pending()
    state = SimpleNamespace(inner=SimpleNamespace(params={}))
    assert carrier._arrive(SimpleNamespace(fragments=None), state, ["k"])
    assert (outcomes, owes, given) == ([], [], [("a state",)])


def test_whether_others_went_on_is_asked_of_the_next_exchange():
    asked = []
    exchange = Exchange(passed_over=lambda key: asked.append(key))
    carrier = JobCarrier(exchange, method())
    assert not carrier.passed_over(4) and asked == ["5"]
    assert JobCarrier(exchange, method(False, 2)).passed_over(4) is False and len(asked) == 1

    def away(key):
        raise StoreUnavailable("away")

    exchange.passed_over = away
    assert carrier.passed_over(4) is True


@pytest.mark.parametrize(
    ("agreed", "ended"),
    [
        (None, False),
        ({}, False),
        ({0: {"sends": 3}}, True),
        ({0: {"sends": 3}, 2: {"sends": 4}}, False),
    ],
)
def test_whether_the_others_have_ended(agreed, ended):
    asked = []
    exchange = Exchange(agreed_terms=lambda key: asked.append(key) or agreed)
    state = State().at(12)
    assert JobCarrier(exchange, method()).ended_before(state) is ended and asked == ["12.end"]
    assert JobCarrier(exchange, method(False, 2)).ended_before(state) is False


def test_final_anchors_that_differ_heal_nobody():
    started = []

    def finish(name):
        raise Parted("they differ", heals=True)

    exchange = Exchange(start=lambda *given, **more: started.append((given, more)), finish=finish)
    carrier = JobCarrier(exchange, method())
    carrier.anchor_history = SimpleNamespace(
        shared=True, note=lambda *_: None, terms=lambda *_: {"anchor": "5"}
    )
    state = State().at(12)
    state.anchor = {}
    carrier._patience_s = 7.0
    with pytest.raises(Parted, match="they differ") as error:
        carrier.close(SimpleNamespace(fragments=None), state)
    assert error.value.heals is False
    how = {"terms": {"anchor": "5", "sends": 3}, "patience_s": 7.0}
    assert started == [(("12.end", {}), {"takes_part": False, **how})]


@pytest.mark.parametrize(
    ("mask", "how", "terms"),
    [
        (ME, {}, {"step": 3, "fragment": 1, "level": 2, "anchor": "5"}),
        (NOBODY, {}, {"step": 3, "fragment": 1, "level": 2, "anchor": "5"}),
        (ME, {"again": True}, {"step": 3, "fragment": 1, "level": 2}),
        (ME, {"by_rounds": True}, {"fragment": 1, "level": 2, "anchor": "5"}),
        (ME, {"sends": False}, None),
    ],
)
def test_what_is_announced_with_a_payload(mask, how, terms):
    """Whether this region takes part, with whom, and what all must have decided alike."""
    started, how = [], dict(how)
    exchange = Exchange(start=lambda *given, **more: started.append((given, more)))
    carrier = JobCarrier(exchange, method(by_rounds=how.pop("by_rounds", False)))
    again = how.pop("again", False)
    carrier.anchor_history = SimpleNamespace(shared=True, sent=lambda *_: {"anchor": "5"})
    w, weight, drift = np.zeros((1, 2), np.float32), np.ones(1), np.full((1, 1), 0.5)
    decided = {"fragment": 1, "sent": 3, "level": 2, "takes_part": mask}
    flight = SimpleNamespace(payload={"w": w}, weight=weight, header={"drift": drift}, **decided)
    loop = SimpleNamespace(
        groups=lambda round_: [(0,), (1, 2)],
        programs=SimpleNamespace(exchange=SimpleNamespace(at=lambda level: None)),
        fragments=SimpleNamespace(like=lambda p: {}),
    )
    counters = SimpleNamespace(sends_until=lambda step: 4 + step, sends=np.array([3, 1]))
    state = SimpleNamespace(in_flight={"k": flight}, anchor={}, counters=counters)
    with carrier.acting(**how):
        carrier.post(loop, state, "k", flight, again=again)
    kept = carrier._pending["k"]
    assert (kept.name, kept.members, kept.sends) == ("7", (1, 2), terms is not None)
    if terms is None:
        assert not started
        return
    (((name, arrays), more),) = started
    assert name == "7" and arrays == {"payload/w": w, "header/drift": drift, "weight": weight}
    assert more == {
        "takes_part": bool(mask[0]),
        "members": (1, 2),
        "terms": terms,
        "reduction": None,
        "patience_s": 0.0,
    }


@pytest.mark.parametrize(
    ("mask", "sends", "sent"), [(ME, True, 200), (NOBODY, True, 0), (ME, False, 0)]
)
def test_bytes_are_announced_as_if_all_others_took_part(mask, sends, sent):
    """96 bytes and a header of 4, from and to two others."""
    carrier = JobCarrier(Exchange(), method())
    whole = SimpleNamespace(nbytes=lambda like: 96, one_by_one=True)
    with carrier.acting(sends=sends):
        traffic = carrier.traffic(whole, 0, {}, mask, None, 4)
    assert (traffic.sent.tolist(), traffic.received.tolist()) == ([sent], [200])


def test_a_header_goes_to_everyone_beside_the_slices(monkeypatch):
    """Three slices of 32 bytes, there and back between three regions, and 4 bytes to each."""
    monkeypatch.setattr(job_traffic, "goes_in_slices", lambda *_: True)
    monkeypatch.setattr(job_traffic, "padded_nbytes", lambda *_: 96)
    whole = SimpleNamespace(nbytes=lambda like: 90)
    traffic = JobTraffic(3, 1).of_payloads(whole, {}, ME, None, 4)
    assert traffic.sent.tolist() == traffic.received.tolist() == [4 * 32 + 2 * 4]


class Moves(SyncLoop):
    """Notes what rules are told."""

    def __init__(self, arrived):
        self._takes_own_parts = self._personal = self.by_rounds = False
        self.measurements, self._rows, self._rules = None, [None, None], [0, 0]
        self.method, self.seen = SimpleNamespace(base="anchor", merge=None), []
        self.fragments = SimpleNamespace(leaves=lambda tree, p: tree)
        self.programs = SimpleNamespace(outer_program=self.outer_program)
        self.carrier = JobCarrier(Exchange(), method())
        self.carrier.collect = lambda loop, state, *_: (state, Collected(arrived, None, {}))

    def outer_program(self, held, sent, rows, told, **static):
        self.seen.append({name: int(x) for name, x in told.items()})
        return held, {}


@pytest.mark.parametrize("counted", [(1, 1, 1), (0, 1, 1), (0, 0, 1)])
def test_rules_are_told_the_round_of_the_payload_whoever_was_counted(counted):
    """Of three regions; a rule that restarts every so many rounds does so as on one mesh."""
    flight = InFlight(*[None] * 4, 1, np.int64(5), None, ME, np.bool_(False), 0, {})
    arrived = dataclasses.replace(flight, takes_part=np.array(counted, bool))
    state = State(in_flight={"k": flight}).at(9)
    state.counters.sends = np.array([4, 3])
    loop = Moves(arrived)
    loop.move(state, Move("k"), True)
    assert loop.seen == [{"fragment": 1, "round": 2, "step": 9}]
