"""Regions that meet in a temporary folder: bare exchanges, and whole jobs."""

import pytest
from regions import learners as by_hand
from regions.party import KINDS, TIMING, Party, at_once

from lowcomm_jax import exchange


@pytest.fixture(params=KINDS)
def party(request, tmp_path):
    """Makes regions that meet in an empty folder by either transport, and closes them."""
    made = Party(KINDS[request.param], f"file://{tmp_path}/meet")
    yield made
    made.close()


@pytest.fixture
def store_party(tmp_path):
    """As `party`, through the store alone."""
    made = Party(exchange.store, f"file://{tmp_path}/meet")
    yield made
    made.close()


@pytest.fixture
def between(tmp_path):
    """`between(regions)(region)`: that region's exchange, joined; all are closed at the end."""
    every = []

    def of(regions, timing=None, kind=exchange.store, **options):
        def make(region):
            url = f"file://{tmp_path}"
            paced = timing or exchange.Timing()  # a busy machine delays beats
            made = kind(url, region, regions, "run", timing=paced, **options)
            every.append(made)
            made.join(60)
            return made

        return make

    yield of
    for made in every:
        made.close()


@pytest.fixture
def brief(between):
    """As `between`, where a region is soon taken for dead."""
    return lambda regions, **options: between(regions, TIMING, **options)


@pytest.fixture
def learners(store_party, monkeypatch):
    """`learners(method)`: regions at a pace of their own, which look when they are told to."""
    by_hand.by_hand(monkeypatch)

    def make(made, count=by_hand.R, step=0, **options):
        options = {"timing": by_hand.TIMING, "keep": 1000, **options}
        regions = [store_party.region(r, count, **options) for r in range(count)]
        at_once(lambda x: x.join(20.0, step), regions)
        data = by_hand.table(count)
        return [by_hand.Learner(one.region, one, made, data) for one in regions]

    return make
