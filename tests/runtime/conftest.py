"""Regions that meet in a temporary folder: bare exchanges, and whole jobs."""

import pytest
from runtime.party import KINDS, TIMING, Party

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
            made = kind(url, region, regions, "run", timing=timing, **options)
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
