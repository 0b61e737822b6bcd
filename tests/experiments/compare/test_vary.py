"""Varied fields: the points of a grid and of random draws, and the frontier."""

import numpy as np
import pytest

from experiments.cli import load_config
from experiments.compare.frontier import frontier
from experiments.compare.vary import points
from lowcomm_jax.checkpoint.load import dotted
from lowcomm_jax.refused import Refused


@pytest.fixture(scope="module")
def base():
    return load_config("diloco", [])[0]


def test_a_grid_has_every_combination_with_values_of_the_fields_types(base):
    given = ("method.period=10,30", "inner.learning_rate=1e-3,2e-3,0.5", "replicas=vmap")
    found = points(base, given, None, 0)
    assert len(found) == 6
    assert found["period=10+learning_rate=2e-3+replicas=vmap"] == {
        "method": {"period": 10},
        "inner": {"learning_rate": 2e-3},
        "replicas": "vmap",
    }
    assert "period=30+learning_rate=0_5+replicas=vmap" in found
    assert base.method.period == 30  # the config itself is not touched


def test_names_tell_fields_apart_that_end_alike(base):
    found = points(base, ("method.outer.learning_rate=0.4", "inner.learning_rate=1"), None, 0)
    assert list(found) == ["outer_learning_rate=0_4+inner_learning_rate=1"]


def test_draws_are_seeded_and_stay_in_their_ranges(base):
    given = ("inner.learning_rate=log(1e-4,1e-1)", "inner.b2=uniform(0.9,0.99)", "batch=2,4")
    found = points(base, given, 60, 3)
    assert list(points(base, given, 5, 3)) == list(found)[:5]
    assert list(points(base, given, 5, 4)) != list(found)[:5]
    drawn = [dotted(point) for point in found.values()]
    rate = np.array([point["inner.learning_rate"] for point in drawn])
    assert rate.min() >= 1e-4 and rate.max() <= 1e-1
    # Half of a logarithmic range lies below its geometric mean.
    assert 0.3 < np.mean(rate < 10**-2.5) < 0.7
    assert all(0.9 <= point["inner.b2"] <= 0.99 for point in drawn)
    assert {point["batch"] for point in drawn} == {2, 4}


def test_everything_wrong_is_named_at_once(base):
    given = ("method.perod=3", "inner.b2=log(1,2)", "batch=2,2", "nothing", "inner.b1=log(2,1)")
    with pytest.raises(ValueError) as error:
        points(base, given, None, 0)
    for part in (
        "'method.perod' is no field of the config; did you mean method.period",
        "inner.b2 is a range: a grid needs values",
        "'batch=2,2': give every value once",
        "'nothing': write field=value",
        "'inner.b1=log(2,1)': 0 < low < high",
    ):
        assert part in str(error.value), part
    with pytest.raises(ValueError, match="batch=two: give a whole number"):
        points(base, ("batch=two",), None, 0)
    with pytest.raises(ValueError, match="2000 points are more than 1000"):
        points(base, ("batch=1,2",), 2000, 0)
    with pytest.raises(ValueError, match="name at least one"):
        points(base, (), None, 0)


def test_points_that_would_have_one_name_are_refused(base):
    given = ("data.corpus=text:a.b,text:a_b,text:c", "batch=2,4", "inner.b1=log(2,1)")
    with pytest.raises(Refused) as error:
        points(base, given, None, 0)
    said = error.value.lines
    assert len(said) == 2 and "inner.b1" in said[0], said
    both = "data.corpus: 'text:a.b' and 'text:a_b' would both be named 'text_a_b': leave one"
    assert both in said[1]
    with pytest.raises(ValueError, match="would both be named"):
        points(base, given[:1], 2, 0)
    given = ("data.corpus=x+tokenizer=y,x", "data.tokenizer=z,y+tokenizer=z")
    with pytest.raises(ValueError, match="two points would be named corpus=x"):
        points(base, given, None, 0)


def test_the_frontier_against_every_pair():
    rng = np.random.default_rng(0)
    for _ in range(20):
        pairs = rng.integers(0, 6, (12, 2)).astype(float)
        loss = {str(i): float(x) for i, (x, _) in enumerate(pairs)}
        cost = {str(i): float(y) for i, (_, y) in enumerate(pairs)}

        def dominated(n, loss=loss, cost=cost):
            return any(
                (loss[m] <= loss[n] and cost[m] <= cost[n])
                and (loss[m] < loss[n] or cost[m] < cost[n])
                for m in loss
            )

        assert set(frontier(loss, cost)) == {n for n in loss if not dominated(n)}
    assert frontier({"a": None, "b": 1.0}, {"a": 1.0, "b": None}) == []
