"""A job that cannot reach the others for a while does the same acts later, and none twice.

The loop and the carrier are the product's. The acts are noted instead of computed, and the others
are not reached where the test wants it so.
"""

import collections
from types import SimpleNamespace

import numpy as np
import pytest
from leaving import counters_of

from lowcomm_jax.jobs import job_carrier
from lowcomm_jax.jobs.job_carrier import JobCarrier, OutagePacing
from lowcomm_jax.schedule import Adaptive, Ranked, Staggered
from lowcomm_jax.schedule.base import Adopt, Move, Send
from lowcomm_jax.state.train_state import InFlight, TrainState
from lowcomm_jax.sync.sync_loop import SyncLoop

ME = np.array([True])
SCHEDULES = {
    "no delay": Staggered(4),
    "fragments without delay": Staggered(4, 2),
    "a delay": Staggered(4, 2, delay=3),
    "lands where another leaves": Staggered(4, 2, delay=2),
    "adaptive": Adaptive(6, 2, 3, delay=2),
    "one period": Staggered(4, delay=4, land_after_send=True),
    "one period, blocking": Staggered(4, delay=4, land_after_send=True, first_round="blocking"),
    "one period, fragments": Staggered(4, 2, delay=4, land_after_send=True),
    "ranked": Ranked(4, ranks=(4, 2), delay=4, land_after_send=True),
}
STEPS = 14


class Away:
    """The exchange of region 0 of two, with nothing to say."""

    count, region = 2, 0

    def fetch_ahead(self, first, count, missed):
        return 0

    def __getattr__(self, name):
        return lambda *given, **named: None


class Denied(JobCarrier):
    """Question number `no` (from 0) of those at step `since` or later is denied."""

    def __init__(self, schedule, since, no):
        super().__init__(Away(), SimpleNamespace(schedule=schedule, topology=None, anchors="each"))
        self.since, self.no, self.asked = since, no, 0

    def _reachable(self):
        self.asked += self._trained >= self.since
        return self._trained < self.since or self.asked != self.no + 1

    def _arrive(self, loop, state, keys):
        return not keys or self._reachable()


class Loop(SyncLoop):
    """Notes (step of the act, act), in one list a call of `run_due`."""

    def __init__(self, schedule, carrier):
        self.schedule, self.carrier, self.count = schedule, carrier, 1
        self.method = SimpleNamespace(base="anchor", signal="pseudo_gradient")
        self.fragments, self.measurements, self._quiet = None, None, (None, None, None, 0)
        self.by_rounds, self.noted, self.decided = False, [], collections.defaultdict(list)
        self.owed = []

    def do(self, state, stage, mask, in_time, events):
        step, flights, counters = int(state.counters.step), dict(state.in_flight), state.counters
        for act in stage:
            if isinstance(act, Send):
                p = act.fragments[0]
                counters = counters.copy()
                counters.last_sent[p], counters.sends[p] = step, counters.sends[p] + 1
                due = np.array([step + self.schedule.delay])
                flights[f"{p}@{step}"] = InFlight(
                    payload=None,
                    snapshot=None,
                    accepted=None,
                    weight=None,
                    fragment=p,
                    sent=step,
                    due=due,
                    takes_part=mask.copy(),
                    anchor_updated=False,
                    level=0,
                    header={},
                    kept=None,
                )
                self.noted.append((step, "send", p))
            elif isinstance(act, Move):
                self.noted.append((step, "move", act.key))
            elif isinstance(act, Adopt):
                self.noted.append((step, "adopt", act.key, in_time and bool(act.regions.any())))
                flights.pop(act.key, None)
                events.append(SimpleNamespace(kind="land", step=step, values={}))
        return state.replace(in_flight=flights, counters=counters)


def run(schedule, since=STEPS + 1, no=0):
    """Run `STEPS` steps; returns the loop, and the acts done in each call."""
    loop = Loop(schedule, Denied(schedule, since, no))
    counters = counters_of(schedule, 1)
    fields = dict.fromkeys(TrainState.__dataclass_fields__)
    state = TrainState(**{**fields, "counters": counters, "in_flight": {}, "rate": np.zeros(9)})
    calls = []
    for _ in range(STEPS):
        before = len(loop.noted)
        state, _ = loop.after(state, 1, ME)
        calls.append(loop.noted[before:])
        assert len(loop.noted) < 20 * STEPS, "the same acts again and again"
    assert state.counters.behind == 0, "all is done in the end"
    return loop, calls


def kinds(noted):
    """(step, kind, fragment or payload) of every act; who adopts may differ where it was late."""
    return [act[:3] for act in noted]


@pytest.mark.parametrize("since", [3, 4, 6, 8])
@pytest.mark.parametrize("no", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_acts_that_were_put_off_are_done_later_in_the_same_order(name, no, since):
    schedule = SCHEDULES[name]
    loop, calls = run(schedule, since, no)
    undisturbed, _ = run(schedule)
    assert kinds(loop.noted) == kinds(undisturbed.noted)
    for call in calls:
        for step in {act[0] for act in call}:
            done, whole = ([a[1] for a in acts if a[0] == step] for acts in (call, loop.noted))
            if done == whole:
                continue
            assert not schedule.land_after_send, f"of one-period step {step} only {done} was done"
            # What lands without delay may be left for later, and nothing else.
            until_sent = done == whole[: len(done)] and done[-1] == "send"
            assert until_sent or ("send" not in done and done == whole[-len(done) :])


@pytest.mark.parametrize("name", ["one period", "one period, fragments", "ranked"])
def test_who_waits_for_a_late_payload_has_not_sent(name):
    """Else it sends in time, does not adopt, and its next pseudo-gradient counts progress twice."""
    loop, _ = run(SCHEDULES[name], since=8, no=1)  # reachable; then the late payload is not
    at_8 = [act for act in loop.noted if act[0] == 8]
    adopts = [act for act in at_8 if act[1] == "adopt"]
    assert at_8[0][1] == "send" and not any(who for *_, who in adopts)
    after = [act for act in loop.noted if act[0] == 12 and act[1] == "adopt"]
    assert after and all(who for *_, who in after), "from its next send on it adopts again"


def test_patience_is_four_times_our_own_pace(monkeypatch):
    """What the others may take after this job was cut off. Two steps a second here: 10 steps may
    take 20 s elsewhere."""
    now = [100.0]
    monkeypatch.setattr(job_carrier.time, "monotonic", lambda: now[0])
    pacing = OutagePacing()
    assert pacing.patience_s(10) == 0.0  # nothing is deferred
    pacing.deferred(50)
    assert pacing.patience_s(10) == 0.0  # of one deferral no pace is known
    now[0] = 103.0
    pacing.deferred(56)
    assert pacing.patience_s(10) == pytest.approx(4 * 10 * 0.5)
    now[0] = 112.0
    pacing.deferred(62)  # since the first, not since the last
    assert pacing.patience_s(10) == pytest.approx(4 * 10 * 1.0)
