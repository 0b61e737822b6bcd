"""Requests of learners that meet through a store: planned, and counted while a run makes them."""

import pytest
from regions.learners import TIMING, ByHand, Learner, R, by_hand, method, run, table
from regions.party import Party, at_once

from experiments.plan.screen import requests_line
from lowcomm_jax import exchange
from lowcomm_jax.models import PRESETS
from lowcomm_jax.network import uniform
from lowcomm_jax.network.collectives import STORE_TRIPS
from lowcomm_jax.planner.methods import planned
from lowcomm_jax.planner.plan import Workload, plan
from lowcomm_jax.planner.requests import learner_requests, looks, per_round
from lowcomm_jax.planner.shapes import decoder_shapes
from lowcomm_jax.refused import Refused
from lowcomm_jax.store.kv import POLL_FAR_S, MetricsCounter, Store


@pytest.mark.slow
def test_a_rounds_requests_are_those_that_a_run_makes(tmp_path, monkeypatch):
    """Everyone reports to every round; looks are counted, since a script decides on them here."""
    by_hand(monkeypatch)
    party = Party(exchange.store, f"file://{tmp_path}/meet")
    regions = [party.region(r, R, timing=TIMING, keep=1000) for r in range(R)]
    at_once(lambda x: x.join(20.0), regions)
    jobs = [Learner(x.region, x, method(3, 0.0), table()) for x in regions]
    run(jobs, 6)
    counts = {"reads": 0, "writes": 0, "looks": 0}

    def count(name, kind, skip=("beat/", "epoch/", "run")):
        before = getattr(Store, name)

        def call(self, keys, *given):
            named = [keys] if isinstance(keys, str) else keys
            counts[kind] += sum(not key.startswith(skip) for key in named)
            return before(self, keys, *given)

        monkeypatch.setattr(Store, name, call)

    count("read", "reads")
    count("read_all", "reads")
    count("write", "writes")
    count("create", "writes")
    look = ByHand.look

    def one_look(self):
        counts["looks"] += 1
        return look(self)

    monkeypatch.setattr(ByHand, "look", one_look)
    landed = jobs[0].loop.carrier.landed
    run(jobs, 30, first=jobs[0].step_number + 1)
    rounds = jobs[0].loop.carrier.landed - landed
    party.close()
    planned = per_round(R, 0)
    assert rounds == 24 and counts["writes"] == pytest.approx(R * rounds * planned["writes"], abs=R)
    a_look = 1 + 2 * (R - 1)  # the next record, and reports to two rounds
    by_looks = counts["looks"] * a_look
    rest = R * rounds * (planned["reads"] - (2 + R - 1) * a_look)
    assert counts["reads"] == pytest.approx(by_looks + rest, rel=0.25)


def test_requests_grow_with_rounds_and_learners():
    far = uniform(4, 1.0, 0.05, compute_s=1.0)
    asked = learner_requests(far, 1e8, 12, 12, 1.0)
    slow = learner_requests(far, 1e8, 12, 3, 1.0)
    assert asked.round_s == 1.0 and slow.round_s == 4.0 and asked.writes == 4 * slow.writes
    assert asked.beats == slow.beats == 17.0
    assert asked.exchange_s == pytest.approx(STORE_TRIPS * 0.1 + 0.1 + 4 * 0.8)


@pytest.mark.parametrize("round_s", [0.05, 0.3, 1.0, 2.5, 60.0, 600.0])
def test_idle_looks_are_the_pauses_of_a_store_that_is_no_folder(round_s, tmp_path):
    store = Store(f"file://{tmp_path}", "run", MetricsCounter())
    store.poll_s = POLL_FAR_S
    number, waited = 0, 0.0
    for pause in store.pauses():
        if waited >= round_s:
            break
        number, waited = number + 1, waited + pause
    assert looks(round_s) == number
    assert number >= round_s / POLL_FAR_S[1]


def test_tau_must_hide_a_round():
    network = uniform(3, 1.0, 0.05, compute_s=0.5)
    work = Workload(decoder_shapes(PRESETS["scaling_550m"]), 11e9, 5e5, network)
    wanted = planned("decoupled_diloco", 3, codec="int4")
    with pytest.raises(Refused, match="writing, committing and fetching a fragment") as e:
        plan(work, [wanted])
    least = int(str(e.value).split("use tau >= ")[1].split(";")[0])
    (row,) = plan(work, [wanted.with_overlap(least)])
    assert row.requests.exchange_s <= least * 0.5
    assert "times a second" in requests_line(row)
