"""Methods whose fragments land while training goes on: Streaming DiLoCo and CoCoDC.

Order inside step t (1-based): inner step; land what was sent in earlier steps and is due; send;
land what has delay 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oracle.loop import (
    Event,
    Reduced,
    Regions,
    Trajectory,
    copy_tree,
    present_at,
    reduce_over,
    subtract,
    take,
    weights_at,
    zeros_like,
)
from oracle.problem import Tree
from oracle.rules import (
    blend_landing,
    change_rate,
    choose_fragment,
    staggered_sends,
    taylor_landing,
)


@dataclass
class Flight:
    """One fragment between its send and its last landing.

    Nobody took part in it where `reduced` is None: it is in flight until the first landing.
    """

    fragment: int
    sent: int
    reduced: Reduced | None
    deltas: list[Tree]
    snapshots: dict[int, Tree]
    waiting: list[int]
    anchor_moved: bool = False


@dataclass
class Clocks:
    """When each fragment was sent last and before last, and how fast it was seen to change.

    A fragment never sent has sent = None; the step before its first send counts as step 0.
    """

    sent: list[int | None]
    previous: list[int]
    scores: list[float]
    landed_scores: dict[int, float] = field(default_factory=dict)


class _Overlapped:
    """The state of one run and what can happen to it."""

    def __init__(self, params, fragments, inner, outer, delays, land_rule, count):
        self.anchor, self.momentum = copy_tree(params), zeros_like(params)
        self.regions = Regions(params, inner, count)
        self.fragments, self.outer = [list(keys) for keys in fragments], outer
        self.delays, self.land_rule, self.count = delays, land_rule, count
        self.flights: list[Flight] = []
        self.wire, self.merge = lambda x: x, None
        size = len(self.fragments)
        self.clocks = Clocks([None] * size, [0] * size, [0.0] * size)
        self.run = Trajectory()

    def fields(self, step, losses=()):
        flights = [(f.fragment, f.sent, tuple(f.waiting)) for f in self.flights]
        return {
            "step": step,
            "anchors": [self.anchor],
            "locals": self.regions.values,
            "momentum": [self.momentum],
            "in_flight": flights,
            "losses": losses,
            "extra": {"scores": tuple(self.clocks.scores), "sent": tuple(self.clocks.sent)},
        }

    def deltas(self, fragment):
        keys = self.fragments[fragment]
        base = take(self.anchor, keys)
        deltas = [subtract(base, take(self.regions.values[r], keys)) for r in range(self.count)]
        return [{key: self.wire(x) for key, x in delta.items()} for delta in deltas]

    def outer_step(self, fragment, mean):
        keys = self.fragments[fragment]
        outer = self.outer[fragment] if isinstance(self.outer, list) else self.outer
        anchor, momentum = outer.step(take(self.anchor, keys), mean, take(self.momentum, keys))
        self.anchor.update(anchor)
        self.momentum.update(momentum)

    def merged(self, fragment, reduced, deltas):
        if self.merge is None:
            return reduced.mean
        who = [r for r, share in enumerate(reduced.shares) if share > 0]
        momentum = take(self.momentum, self.fragments[fragment])
        return self.merge([deltas[r] for r in who], [reduced.shares[r] for r in who], momentum)

    def send(self, step, fragment, present, weights):
        if any(flight.fragment == fragment for flight in self.flights):
            return
        deltas = self.deltas(fragment)
        reduced = reduce_over(deltas, present, weights)
        keys = self.fragments[fragment]
        snapshots = {r: take(self.regions.values[r], keys) for r in present}
        waiting = list(present) or [self.delays.index(min(self.delays))]
        self.flights.append(Flight(fragment, step, reduced, deltas, snapshots, waiting))
        self.clocks.previous[fragment] = self.clocks.sent[fragment] or 0
        self.clocks.sent[fragment] = step
        kind, excluded = ("skip", ()) if reduced is None else ("send", reduced.excluded)
        self.run.events.append(Event(step, kind, fragment, 0, present, excluded))

    def land(self, step, flight, due, kind="land"):
        if flight.reduced is None:
            flight.waiting.clear()
            return
        if not flight.anchor_moved:
            merged = self.merged(flight.fragment, flight.reduced, flight.deltas)
            self.outer_step(flight.fragment, merged)
            flight.anchor_moved = True
            interval = flight.sent - self.clocks.previous[flight.fragment]
            rate = change_rate(flight.reduced.mean, interval)
            self.clocks.landed_scores[flight.fragment] = rate
        staleness, rule = step - flight.sent, self.land_rule
        if isinstance(rule, list):
            rule = rule[flight.fragment]
        for r in due:
            for key in self.fragments[flight.fragment]:
                self.regions.values[r][key] = rule(
                    self.anchor[key],
                    self.regions.values[r][key],
                    flight.snapshots[r][key],
                    staleness,
                )
            flight.waiting.remove(r)
        self.run.events.append(Event(step, kind, flight.fragment, staleness, tuple(due)))

    def land_due(self, step, *, sent_now):
        for flight in self.flights:
            if (flight.sent == step) != sent_now:
                continue
            due = [r for r in flight.waiting if step - flight.sent >= self.delays[r]]
            if due:
                self.land(step, flight, due)
        self.flights = [flight for flight in self.flights if flight.waiting]

    def publish_scores(self):
        for fragment, score in self.clocks.landed_scores.items():
            self.clocks.scores[fragment] = score
        self.clocks.landed_scores.clear()

    def finish(self, step, weights):
        for flight in self.flights:
            self.land(step, flight, list(flight.waiting), kind="drain")
        self.flights = []
        everyone = tuple(range(self.count))
        for p, keys in enumerate(self.fragments):
            deltas = self.deltas(p)
            if not any(value.any() for delta in deltas for value in delta.values()):
                continue  # nothing was learned since the landing: momentum alone must not move it
            reduced = reduce_over(deltas, everyone, weights)
            if reduced is None:
                continue
            self.outer_step(p, self.merged(p, reduced, deltas))
            for r in everyone:
                self.regions.values[r].update(take(self.anchor, keys))
            self.run.events.append(Event(step, "final", p, 0, everyone, reduced.excluded))
        self.run.record_finished(**self.fields(step))


def _delays(overlap, count):
    delays = [overlap] * count if isinstance(overlap, int) else list(overlap)
    if len(delays) != count:
        raise ValueError(f"overlap has {len(delays)} entries for {count} regions")
    return delays


def _check_fragments(fragments, params):
    dealt = sorted(key for keys in fragments for key in keys)
    if dealt != sorted(params):
        raise ValueError(f"fragments {fragments} do not partition {sorted(params)}")


def run_streaming(
    params: Tree,
    batches: dict,
    *,
    fragments: Sequence[Sequence[str]],
    period: int,
    overlap: int | Sequence[int] = 0,
    alpha: float = 0.5,
    inner,
    outer,
    participants=None,
    weights=None,
    finish=False,
    wire=None,
    merge=None,
) -> Trajectory:
    """Run Streaming DiLoCo (arXiv 2501.18512, Algorithm 2) with the shared anchor as base.

    `outer`, `alpha`: one, or a list of one for each fragment. `merge`: of `oracle.merging`; None =
    the mean.
    `wire` gives what receivers read of an array; None = the array.

    `overlap` is tau, one for all or one per region. With different ones the anchor moves when
    the first region lands, the others land on that same anchor later, and the fragment is in
    flight until the last has landed.
    """
    _check_fragments(fragments, params)
    steps, count = batches["x"].shape[:2]
    delays = _delays(overlap, count)
    landing = [blend_landing(a) for a in alpha] if isinstance(alpha, list) else blend_landing(alpha)
    state = _Overlapped(params, fragments, inner, outer, delays, landing, count)
    state.wire, state.merge = wire or state.wire, merge
    state.run.record(**state.fields(0))
    for t in range(1, steps + 1):
        losses = state.regions.step(batches, t)
        state.land_due(t, sent_now=False)
        for p in staggered_sends(t, len(fragments), period):
            present = present_at(participants, t, count)
            state.send(t, p, present, weights_at(weights, t, count))
        state.land_due(t, sent_now=True)
        state.publish_scores()
        state.run.record(**state.fields(t, losses))
    if finish:
        state.finish(steps, weights_at(weights, steps, count))
    return state.run


def run_cocodc(
    params: Tree,
    batches: dict,
    *,
    fragments: Sequence[Sequence[str]],
    period: int,
    overlap: int | Sequence[int],
    lam: float,
    inner,
    outer,
    syncs: int | None = None,
    schedule: Mapping[int, Sequence[int]] | None = None,
    scores_from: str = "landing",
    participants=None,
    weights=None,
    finish=False,
) -> Trajectory:
    """Run CoCoDC (arXiv 2504.17672): Taylor landing with fixed lambda, adaptive transmission.

    `schedule` {step: fragments to send} overrides the adaptive choice; what is in flight is
    passed over. Otherwise every floor(H / N) steps, N = `syncs` (default K), one fragment is
    chosen. `scores_from`: "landing" = a score counts from the slot of the step it landed in,
    "period" = from the first step that is a multiple of H at or after that landing.
    """
    _check_fragments(fragments, params)
    if scores_from not in ("landing", "period"):
        raise ValueError(f"scores_from={scores_from!r}: use 'landing' or 'period'")
    steps, count = batches["x"].shape[:2]
    delays = _delays(overlap, count)
    state = _Overlapped(params, fragments, inner, outer, delays, taylor_landing(lam), count)
    spacing = period // (len(fragments) if syncs is None else syncs)
    state.run.record(**state.fields(0))
    for t in range(1, steps + 1):
        losses = state.regions.step(batches, t)
        state.land_due(t, sent_now=False)
        if scores_from == "landing" or t % period == 0:
            state.publish_scores()
        if schedule is not None:
            chosen = list(schedule.get(t, ()))
        elif t % spacing == 0:
            busy = [flight.fragment for flight in state.flights]
            clocks = state.clocks
            pick = choose_fragment(t, period, clocks.sent, clocks.scores, busy)
            chosen = [] if pick is None else [pick]
        else:
            chosen = []
        for p in chosen:
            present = present_at(participants, t, count)
            state.send(t, p, present, weights_at(weights, t, count))
        state.land_due(t, sent_now=True)
        if scores_from == "landing":
            state.publish_scores()
        state.run.record(**state.fields(t, losses))
    if finish:
        state.finish(steps, weights_at(weights, steps, count))
    return state.run
