"""Which methods run between jobs: the others are refused by name, and docs/regions.md says why."""

import dataclasses
from pathlib import Path

import pytest
from refused_lines import lines_between_jobs
from regions.test_same_numbers import METHODS

import lowcomm_jax as lc
from lowcomm_jax import compression
from lowcomm_jax.compression.ef21 import ef21
from lowcomm_jax.rules.batching import NormTest
from lowcomm_jax.schedule import Staggered

SPEEDS = (1.0, 1.0, 1.0)
RUN = {  # besides those that `test_same_numbers` trains between jobs
    "delayed_diloco": lambda m: m.delayed_diloco(4),
    "dilocox, by default": lambda m: m.dilocox(4),
    "sparseloco, by default": lambda m: m.sparseloco(4),
    "noloco, by default": lambda m: m.noloco(4),
    "gasloc, dense": lambda m: m.gasloc(4, 0.6, 0.3, 0.8),
    "partial_updates": lambda m: m.partial_updates(4, lc.roles.Shares("a")),
    "muloco": lambda m: m.muloco(4),
    "decoupled_momentum": lambda m: m.decoupled_momentum(4),
    "async_local_sgd": lambda m: m.async_local_sgd(4, SPEEDS),
    "heloco": lambda m: m.heloco(4, SPEEDS),
    "adloco": lambda m: m.adloco(4),
    "a policy": lambda m: m.diloco(4, inner_batching=NormTest(start=2, cap=8)),
}
REFUSED = {  # the method, what its refusal names, and the row of the docs
    "ddp": (lambda m: m.ddp(), "at every step", "AllReduce"),
    "demo": (lambda m: m.demo(), "at every step", "DeMo"),
    "ef21": (lambda m: m.diloco(4, codec=ef21(compression.make("topk"))), "running mean", "EF21"),
    "eager": (lambda m: m.eager_diloco(4), "own part apart", "eager DiLoCo"),
    "arrivals with a policy": (
        lambda m: m.heloco(4, SPEEDS, inner_batching=NormTest(start=2, cap=8)),
        "in all regions",
        "batch policies",
    ),
    "fragments": (
        lambda m: dataclasses.replace(
            m.streaming_diloco(4, 2, 1, 0.5), inner_batching=NormTest(start=2, cap=8)
        ),
        "use one fragment and no overlap",
        "several fragments or an overlap",
    ),
    "halos": (lambda m: m.halos(4, SPEEDS, [[0], [1, 2]]), "local servers", "HALoS"),
    "a_edit": (lambda m: m.a_edit(2.0, 0.5, SPEEDS), "a pace of their own", "A-EDiT"),
    "gasloc": (
        lambda m: m.gasloc((4, 2, 3), 0.6, 0.3, 0.8),
        "a pace of their own",
        "GASLoC with a period for each region",
    ),
    "sparta": (lambda m: m.sparta(), "channels exchange", "SPARTA"),
    "des_loc": (lambda m: m.des_loc(4, 8, 8), "channels exchange", "DES-LOC"),
}


@pytest.mark.parametrize("name", [*RUN, *METHODS])
def test_these_run(name):
    made = RUN[name](lc.methods) if name in RUN else METHODS[name]()
    assert lines_between_jobs(made) == []


@dataclasses.dataclass(frozen=True)
class OwnPace(Staggered):
    """A schedule of a user's own, whose regions stand still at times."""

    speeds = ()


def test_regions_at_a_pace_that_nothing_counts_are_refused():
    made = dataclasses.replace(lc.methods.diloco(4), schedule=OwnPace(4))
    (line,) = lines_between_jobs(made)
    assert "regions at a pace of their own are simulated only" in line


@pytest.mark.parametrize("name", REFUSED)
def test_these_are_refused_in_one_line_and_the_docs_say_why(name):
    make, reason, row = REFUSED[name]
    found = lines_between_jobs(make(lc.methods))
    assert sum(reason in line for line in found) == 1, found
    docs = Path(__file__).parents[2] / "docs" / "regions.md"
    table = docs.read_text(encoding="utf-8").partition("### Methods that are refused")[2]
    assert any(row in line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
