"""What a job defers, catches up with, reports and lands: decided step by step, without others."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lowcomm_jax.jobs import job_delivery
from lowcomm_jax.jobs.job_carrier import JobCarrier, OutagePacing, _missed, expect
from lowcomm_jax.jobs.job_delivery import JobDelivery, PendingExchange
from lowcomm_jax.rounds.request import arrange
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
    codec: tuple = ("of fragment 0", "of fragment 1")

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    def at(self, step):
        """The state when so many steps are made, with nothing of the last ones done."""
        behind = step - self.counters.done_until
        return self.replace(counters=dataclasses.replace(self.counters, step=step, behind=behind))


class Notes:
    """A delivery, and its exchange, that notes its calls."""

    def __init__(self, reachable=True):
        self.calls, self.is_reachable, self.trained, self.known = [], reachable, None, 9
        self.exchange = self

    def reachable(self):
        return self.is_reachable

    def arrives(self, state, keys, fragments):
        return True

    def fetch_ahead(self, sends, steps, missed):
        self.calls.append(("fetch_ahead", sends, steps, missed))
        return sends + self.known

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "patience_s":
            self.calls.append((name, value))

    def __getattr__(self, name):
        return lambda *given, **more: self.calls.append((name, *given, *more.values()))


class Loop(SyncLoop):
    """Events are due after every third step, and done while the others can be reached."""

    def __init__(self, reachable=True):
        self.carrier = JobCarrier(Notes(reachable))
        self.done, self.sends, self._quiet = [], lambda step: True, (None, None, None, 0)
        self.schedule, self.fragments, self.count = Staggered(6, 2), None, 1

    @property
    def delivery(self):
        return self.carrier.delivery

    @property
    def pacing(self):
        return self.carrier.pacing

    def is_due(self, state, step):
        return step % 3 == 0

    def events_at(self, state, mask, in_time, events):
        counters = state.counters
        self.done.append((int(counters.step), bool(mask[0]), in_time, int(counters.behind)))
        if not self.carrier.reach(self, state, (Send((0,)),), False):
            return state, False
        counters = counters.copy()
        if self.sends(counters.step):
            counters.last_sent[0] = counters.step
            counters.sends = np.add(counters.sends, [1, 0])
        state = state.replace(counters=counters)
        self.carrier.done(self, state, in_time)
        return state, True

    def calls(self):
        """What was asked of the delivery, but for telling of progress."""
        told = "publish_progress", "pass_steps"
        return [call for call in self.delivery.calls if call[0] not in told]


def test_what_is_due_is_done_with_the_others():
    loop = Loop()
    state = loop.run_due(State().at(2), ME, [])
    assert loop.done == [] and state.counters.behind == 0 and loop.delivery.trained == 2
    state = loop.run_due(state.at(3), ME, [])
    assert loop.done == [(3, True, True, 1)] and loop.calls() == []
    assert (state.counters.step, state.counters.behind, loop.pacing.first) == (3, 0, None)


def test_what_is_due_while_nobody_can_be_reached_is_made_up_for_as_if_absent():
    loop = Loop(reachable=False)
    state = loop.run_due(State().at(3), ME, [])
    assert state.counters.behind == 1 and loop.pacing.first[0] == 3
    assert loop.delivery.calls == [("stopped",), ("beat", 3)]
    for step in (4, 8):
        state = loop.run_due(state.at(step), ME, [])
        assert (state.counters.step, state.counters.behind) == (step, step - 3 + 1)
    assert loop.done[1:] == [(3, False, False, 1)] * 2 and loop.pacing.last[0] == 8
    loop.done.clear(), loop.delivery.calls.clear()
    loop.delivery.is_reachable = True
    loop.carrier.pacing = SimpleNamespace(first=(3, 0.0), patience_s=lambda steps: 10.0 * steps)
    state = loop.run_due(state.at(9), ME, [])
    late = [(step, False, False, 1) for step in (3, 6)]
    assert loop.done == [*late, (9, True, True, 1)] and state.counters.behind == 0
    assert loop.calls() == [
        ("fetch_ahead", 3, 9 - 3 + 1, 2),
        ("patience_s", 10.0),  # the steps since that of the first deferral
        *[("patience_s", 30.0)] * 2,
        ("patience_s", 0.0),
        ("forget_ahead",),
    ]
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
    names = [name for name, *_ in loop.delivery.calls]
    assert ("fetch_ahead" in names) is ahead and ("forget_ahead" in names) is ahead


@pytest.mark.parametrize(
    ("known", "asked"), [(9, [3]), (1, [3, 4, 5]), (0, [3, 4, 5]), (2, [3, 5])]
)
def test_more_is_read_ahead_once_what_was_read_is_done(known, asked):
    """But never for the step of now: in its sends this region has a part."""
    loop = Loop()
    loop.pacing.deferred(3)
    loop.delivery.known = known
    loop.run_due(State().at(12), ME, [])
    calls = [call for call in loop.delivery.calls if call[0] == "fetch_ahead"]
    assert [sends for _, sends, _, _ in calls] == asked
    steps = [3 + 3 * (sends - 3) for sends in asked]  # an event, with a send, every third step
    assert [given for _, _, *given in calls] == [[12 - at + 1, (12 - at) // 3] for at in steps]


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
    assert _missed(loop, state, now) == missed
    loop.schedule = Adaptive(6, 2, 1, 1)
    assert _missed(loop, state, now) == 0


def test_what_was_read_ahead_is_let_go_of_whatever_happens():
    loop = Loop()
    loop.pacing.deferred(3)
    loop.events_at = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loop.run_due(State().at(4), ME, [])
    assert loop.delivery.calls[-1] == ("forget_ahead",)


@pytest.mark.parametrize("lands", [False, True])
def test_a_send_needs_the_others_and_a_landing_its_payloads(lands):
    """What cannot be done is put off, and the others are told how far this region is."""
    asked = []
    exchange = SimpleNamespace(beat=lambda trained: asked.append(("trained", trained)))
    delivery = SimpleNamespace(
        exchange=exchange,
        reachable=lambda: asked.append("reach"),
        arrives=lambda state, keys, fragments: asked.append(keys),
        stopped=lambda: False,
        trained=5,
    )
    carrier = JobCarrier(delivery)
    stage = (Move("a"), Move(None, "b")) if lands else (Send((0,)),)
    loop = SimpleNamespace(schedule=Staggered(5 if lands else 4), fragments=None, count=1)
    assert not carrier.reach(loop, State().at(4), stage, False)
    assert asked == [["a"] if lands else "reach", ("trained", 5)] and carrier.pacing.first[0] == 5
    delivery.reachable, delivery.arrives = (lambda: True), (lambda *_: True)
    assert carrier.reach(loop, State().at(4), stage, False) and asked[2:] == []


def test_a_wait_that_was_stopped_puts_nothing_off():
    """The step is done later, and in time."""
    delivery = SimpleNamespace(arrives=lambda *_: False, stopped=lambda: True, trained=5)
    carrier = JobCarrier(delivery)
    loop = SimpleNamespace(schedule=Staggered(5), fragments=None, count=1)
    assert not carrier.reach(loop, State().at(4), (Move("a"),), False)
    assert carrier.paused and carrier.pacing.first is None


class Carries(JobCarrier):
    """Notes what is posted."""

    def __init__(self):
        super().__init__(SimpleNamespace(listens_only=False, ahead=None))
        self.delivery.learns_outcome = lambda key: True
        self.started = []

    def post(self, loop, state, key, flight, again=False):
        number = state.counters.sends_until(flight.sent)
        self.started.append((key, number, again, self.delivery.listens_only))


class Sends(SyncLoop):
    """A region whose payloads in flight are started again; sends are numbered by their steps."""

    def __init__(self):
        self.carrier = Carries()
        self.delivery, self.started = self.carrier.delivery, self.carrier.started


def sent(step, fragment=0, takes_part=ME, kept=(), moved=False):
    more = {"takes_part": takes_part, "kept": kept, "anchor_updated": moved}
    return SimpleNamespace(sent=step, fragment=fragment, **more)


def test_what_is_in_flight_is_started_again_in_the_order_of_the_sends():
    """But for what has landed and waits for regions alone; a listener starts it as one."""
    loop, state = Sends(), State()
    state.counters.sends_until = lambda step: 10 + step
    state.in_flight = {"b": sent(5), "a": sent(7), "c": sent(2), "d": sent(3, moved=True)}
    loop.carrier.reconnect(loop, state)
    assert loop.started == [("c", 12, True, False), ("b", 15, True, False), ("a", 17, True, False)]
    loop.started.clear()
    expect(loop, state)
    assert [one[3] for one in loop.started] == [True] * 3 and not loop.delivery.listens_only
    state.in_flight = {"a": sent(5, takes_part=NOBODY, kept=None)}
    loop.carrier.reconnect(loop, state)
    state.in_flight = {"a": sent(5, kept=None)}
    with pytest.raises(ValueError, match="'a' is in flight without the codec's state"):
        expect(loop, state)
    assert not loop.delivery.listens_only


@pytest.mark.parametrize(("counted", "all_were"), [((1, 1, 1), True), ((1, 0, 1), False)])
def test_it_is_noted_who_was_counted_and_whether_it_is_adopted(counted, all_were):
    loop, state, seen = Sends(), State(), []
    arrived = sent(5, fragment=1, takes_part=np.array(counted, bool))
    arrived.header = {"x": 1}
    state.counters.counted = np.array([False, not all_were])
    state.counters.sends, state.in_flight = np.array([0, 16]), {"k": sent(5, fragment=1)}
    came = Collected(arrived, None, {})
    loop.delivery.finish = lambda state, key: (state, came)
    carrier = loop.carrier
    assert carrier.collect(loop, state, "k", False, True) == (state, came)
    assert state.counters.counted.tolist() == [False, all_were]
    carrier.witness = seen.append
    for adopts, last in ((True, False), (True, True), (False, False)):
        carrier.collect(loop, state, "k", last, adopts)
        one = seen.pop()
        assert one[:4] == (1, 5, 15, last) and one.counted_N.tolist() == list(map(bool, counted))
        assert one.adopted is adopts and one.header == {"x": 1}
    loop.delivery.learns_outcome = lambda key: False
    carrier.collect(loop, state, "k", False, True)
    assert not seen


# -- the delivery -----------------------------------------------------------------------------


class Exchange:
    """The exchange of region 1 of three, with given answers."""

    count, region = 3, 1

    def __init__(self, **answers):
        self.calls = []
        for name, answer in answers.items():
            setattr(self, name, answer)


def pending(members=(0, 1, 2), listens_only=False):
    return PendingExchange("7", {}, members, {}, listens_only, None)


@pytest.mark.parametrize(
    ("one", "learns"),
    [
        (None, True),
        (pending(), True),
        (pending(listens_only=True), True),
        (pending((0, 1)), True),
        (pending((0, 1), listens_only=True), False),
    ],
)
def test_who_only_listens_to_a_small_group_learns_nothing(one, learns):
    delivery = JobDelivery(Exchange(), shared=True)
    if one is not None:
        delivery._pending["k"] = one
    assert delivery.learns_outcome("k") is learns


@pytest.mark.parametrize(("members", "listens"), [((0, 1), False), ((0, 1, 2), True)])
def test_who_only_listens_waits_for_all_but_not_for_a_small_group(members, listens):
    """Its members may never exchange: then nothing has come of it, and nobody is counted."""
    delivery, heard = JobDelivery(Exchange(), shared=True), []
    like = {"weight": jax.ShapeDtypeStruct((1,), np.float32)}
    delivery._pending["k"] = PendingExchange("7", {}, members, like, True, None)
    delivery._listen = lambda one: heard.append(one.name) or arrange({}, like, 3)
    due, none = np.full(1, 4), np.zeros(1, np.float32)
    numbers = {"fragment": 0, "sent": 3, "due": due, "level": 0, "header": {}}
    flight = InFlight({}, None, NOBODY, none, takes_part=NOBODY, anchor_updated=False, **numbers)
    _, (got, _, _) = delivery.finish(State(in_flight={"k": flight}), "k")
    assert heard == ["7"] * listens and "k" not in delivery._pending
    assert got.takes_part.tolist() == [False] * len(members) and not got.weight.any()


def test_the_group_of_this_region():
    delivery = JobDelivery(Exchange(), shared=True)
    assert delivery.own_group(None) == (0, 1, 2) and delivery.own_group([(0,), (1, 2)]) == (1, 2)


@pytest.mark.parametrize(
    ("reachable", "ready", "never", "listens", "arrives"),
    [
        (True, False, False, False, True),
        (False, False, False, False, False),
        (False, True, False, False, True),  # it is here already
        (False, False, True, False, True),
        (False, False, False, True, True),
    ],
)
def test_what_can_be_landed_now(reachable, ready, never, listens, arrives):
    exchange = Exchange(
        reachable=lambda: reachable,
        ready=lambda name: ready,
        arrives=lambda name, answers: True,
    )
    delivery = JobDelivery(exchange, shared=False)
    delivery.never_defers = never
    delivery._pending["k"] = pending(listens_only=listens)
    state = SimpleNamespace(inner=SimpleNamespace(params={}))
    assert delivery.arrives(state, ["k"], None) is arrives
    assert delivery.arrives(state, ["other"], None)
    assert delivery.reachable() is (reachable or never)


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
    delivery = JobDelivery(exchange, shared=False)
    delivery.gives, delivery._pending["k"] = (lambda state: ("a state",)), pending()
    state = SimpleNamespace(inner=SimpleNamespace(params={}))
    assert delivery.arrives(state, ["k"], None)
    assert (outcomes, owes, given) == ([], [], [("a state",)])


def test_whether_others_went_on_is_asked_of_the_next_exchange():
    asked = []
    exchange = Exchange(
        passed_over=lambda key: asked.append(key),
        fetch_ahead=lambda *given: asked.append(given) or 7,
    )
    delivery = JobDelivery(exchange, shared=True)
    groups = JobDelivery(exchange, shared=False, group_size=2)
    delivery.passed_over(4)
    assert delivery.fetch_ahead(4, 9, 2) == 4 + 7
    assert asked == ["5", (5, 9, 2)]
    assert groups.passed_over(4) is False and groups.fetch_ahead(4, 9, 2) == 4
    assert len(asked) == 2

    def away(key):
        raise StoreUnavailable("away")

    exchange.passed_over = away
    assert delivery.passed_over(4) is True


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
    assert JobDelivery(exchange, shared=True).ended_before(state) is ended and asked == ["12.end"]
    groups = JobDelivery(exchange, shared=False, group_size=2)
    assert groups.ended_before(state) is False


def test_final_anchors_that_differ_heal_nobody():
    started = []

    def finish(name, like):
        raise Parted("they differ", heals=True)

    exchange = Exchange(start=lambda *given, **more: started.append((given, more)), finish=finish)
    delivery = JobDelivery(exchange, shared=True)
    delivery.anchor_history = SimpleNamespace(
        shared=True, note=lambda *_: None, terms=lambda *_: {"anchor": "5"}
    )
    state = State().at(12)
    state.anchor = {}
    delivery.patience_s = 7.0
    with pytest.raises(Parted, match="they differ") as error:
        delivery.compare_final_anchors(state, None)
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
        (ME, {"listens_only": True}, None),
    ],
)
def test_what_is_announced_with_a_payload(mask, how, terms):
    """Whether this region takes part, with whom, and what all must have decided alike."""
    started, how = [], dict(how)
    exchange = Exchange(start=lambda *given, **more: started.append((given, more)))
    delivery = JobDelivery(exchange, shared=True)
    again = how.pop("again", False)
    vars(delivery).update(how)
    delivery.anchor_history = SimpleNamespace(shared=True, sent=lambda *_: {"anchor": "5"})
    w, weight, drift = np.zeros((1, 2), np.float32), np.ones(1), np.full((1, 1), 0.5)
    decided = {"fragment": 1, "sent": 3, "level": 2, "takes_part": mask}
    flight = SimpleNamespace(payload={"w": w}, weight=weight, header={"drift": drift}, **decided)
    whole, cut = SimpleNamespace(one_by_one=True), SimpleNamespace(like=lambda p: {})
    counters = SimpleNamespace(sends_until=lambda step: 4 + step)
    state = SimpleNamespace(in_flight={"k": flight}, anchor={}, counters=counters)
    delivery.start(state, "k", [(0,), (1, 2)], whole, cut, again=again)
    kept = delivery._pending["k"]
    assert (kept.name, kept.members, kept.listens_only) == ("7", (1, 2), terms is None)
    assert {k: x.shape for k, x in kept.like.items()} == {
        "payload/w": (1, 2),
        "header/drift": (1, 1),
        "weight": (1,),
    }
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
    ("mask", "listens", "sent"), [(ME, False, 200), (NOBODY, False, 0), (ME, True, 0)]
)
def test_bytes_are_announced_as_if_all_others_took_part(mask, listens, sent):
    """96 bytes and a header of 4, from and to two others."""
    delivery = JobDelivery(Exchange(), shared=True)
    delivery.listens_only = listens
    whole = SimpleNamespace(nbytes=lambda like: 96, one_by_one=True)
    traffic = delivery.traffic(whole, {}, mask, None, 4)
    assert (traffic.sent.tolist(), traffic.received.tolist()) == ([sent], [200])


def test_a_header_goes_to_everyone_beside_the_slices(monkeypatch):
    """Three slices of 32 bytes, there and back between three regions, and 4 bytes to each."""
    monkeypatch.setattr(job_delivery, "goes_in_slices", lambda *_: True)
    monkeypatch.setattr(job_delivery, "padded_nbytes", lambda *_: 96)
    delivery = JobDelivery(Exchange(), shared=True)
    traffic = delivery.traffic(SimpleNamespace(nbytes=lambda like: 90), {}, ME, None, 4)
    assert traffic.sent.tolist() == traffic.received.tolist() == [4 * 32 + 2 * 4]


class Moves(SyncLoop):
    """Notes what rules are told."""

    def __init__(self, arrived):
        self._takes_own_parts = self.by_rounds = False
        self.measurements = None
        self.method, self.seen = SimpleNamespace(base="anchor"), []
        self.carrier = JobCarrier(SimpleNamespace())
        self.carrier.collect = lambda loop, state, *_: (state, Collected(arrived, None, {}))

    def update_anchor(self, state, flight, told, own=None, if_news=False):
        self.seen.append({name: int(x) for name, x in told.items()})
        return state, {}


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
