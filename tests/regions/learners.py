"""Learners that are jobs of their own, in one thread: a script says who steps, and when they look.

Time is a script's, too. So who is admitted where follows from the script alone.
"""

import time

import jax
import numpy as np
import oracle
from oracle import merging
from regions.party import at_once
from regions.together import engine, rows

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.rounds import remote
from lowcomm_jax.rounds.paced_rounds import RoundExchange

KEYS = [["a"], ["c"], ["b", "s"]]
PATTERN = ["^a$", "^c$", "^(b|s)$"]
TIMING = exchange.Timing(beat_s=0.2, dead_after_s=30.0, answer_s=1.0)
R, MOST = 3, 60


def method(quorum=1, grace=0.0, period=3, overlap=2, **more):
    return lc.methods.decoupled_diloco(period, 3, overlap, quorum, grace, pattern=PATTERN, **more)


def table(regions=R):
    return oracle.make_batches(steps=MOST, regions=regions)


class ByHand(RoundExchange):
    """Looks when it is told to; `now` is the time of all."""

    now = 0.0

    def __init__(self, *given):
        super().__init__(*given, clock=lambda: ByHand.now)

    def _run(self):
        """Nothing: it looks when it is told to."""

    def wait(self):
        """Nobody else moves meanwhile."""
        self.look()
        time.sleep(0.001 * fetching(self))


def fetching(rounds):
    """Whether payloads are on their way to a learner."""
    begun = [fetch for one in list(rounds._rounds.values()) for fetch in list(one._begun)]
    ended = [one.complete or one.hopeless or one._cancelled for one in begun]
    return not all(ended)


def by_hand(monkeypatch):
    ByHand.now = 0.0
    monkeypatch.setattr(remote, "RoundExchange", ByHand)


class Learner:
    """One of them, with its log: (own step, "report" or "land", round)."""

    def __init__(self, region, own, made, data):
        self.region, self.exchange, self.data = region, own, data
        self.one = engine(made, own.count, own)
        self.state = self.one.init(oracle.make_params())
        self.log, self.admitted, self.steps = [], {}, 0

    @property
    def loop(self):
        return self.one.sync_loop(self.state)

    def step(self, rounds):
        """One inner step, unless so many rounds have landed; and what follows it."""
        batch = rows(oracle.step_batch(self.data, self.step_number + 1), self.region)
        with jax.numpy_dtype_promotion("standard"):
            self.state, history = self.one.run(self.state, [batch], rounds=rounds)
        for event in history.events:
            number = int(event.values["round"])
            kind = {"send": "report", "land": "land"}[event.kind]
            self.log.append((event.step, kind, number))
            if kind == "land":
                self.admitted[number] = tuple(np.flatnonzero(event.values["admitted"]).tolist())

    @property
    def step_number(self):
        return int(self.state.counters.step)

    def anchor(self):
        return {k: np.array(x[0]) for k, x in self.state.anchor.items()}

    def values(self):
        return {k: np.array(x[0]) for k, x in self.state.inner.params.items()}


def look(learners):
    """All look until nobody learns anything new."""
    looking = [one for one in learners if one.loop.carrier.rounds is not None]
    quiet = 0
    while quiet < 2:
        news = [one.loop.carrier.rounds.look() for one in looking]
        if any(fetching(one.loop.carrier.rounds) for one in looking):
            time.sleep(0.001)
            quiet = 0
            continue
        quiet = 0 if any(news) else quiet + 1


def run(learners, rounds, speeds=(1.0, 1.0, 1.0), first=1, away=(), last=MOST):
    """Ticks until all have landed so many rounds; away: (region, first tick, last tick)."""
    progress = [v * (first - 1) for v in speeds]
    for tick in range(first, 10 * MOST):
        if tick > last or all(one.loop.carrier.landed >= rounds for one in learners):
            return tick
        ByHand.now = float(tick)
        for i, (one, v) in enumerate(zip(learners, speeds, strict=True)):
            before, progress[i] = int(progress[i] + 1e-9), progress[i] + v
            gone = any(q == one.region and a <= tick <= b for q, a, b in away)
            if int(progress[i] + 1e-9) > before and not gone:
                one.step(rounds)
        look(learners)
    raise AssertionError("the rounds never end")


def finish(learners):
    """The last synchronisation, of all at once."""

    def end(one):
        with jax.numpy_dtype_promotion("standard"):
            one.before = one.anchor()
            one.state = one.one.finish(one.state)

    at_once(end, learners)


def assert_equal(learners, what="anchor"):
    """All have the same anchors, or `values`, bit for bit."""
    first, *others = [getattr(one, what)() for one in learners]
    for other in others:
        for key in first:
            np.testing.assert_array_equal(first[key], other[key], key)


def records(learner, rounds, since=0):
    """Who was admitted to each round, as the records in the store say."""
    context = learner.exchange._context
    epoch = learner.exchange.epoch
    found = {k: context.commit_log.committed(f"{epoch}/round{k}") for k in range(since, rounds)}
    return {k: tuple(sorted(one.admitted)) for k, one in found.items()}


def derive(learners, admitted, inner, merge=None):
    return oracle.run_learner_jobs(
        oracle.make_params(),
        learners[0].data,
        [one.log for one in learners],
        [one.step_number for one in learners],
        admitted,
        fragments=KEYS,
        merge=merge or merging.radial_directional(),
        inner=inner,
        outer=oracle.Nesterov(0.7, 0.9),
    )
