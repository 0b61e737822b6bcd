"""Jobs that meet in a temporary folder."""

import pytest
from exchange.party import TIMING, Party

from lowcomm_jax import exchange


@pytest.fixture
def between(tmp_path):
    """`between(regions)(region)`: that region's exchange, joined; all are closed in the end."""
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
def party(tmp_path):
    """Makes regions that meet in an empty folder, and closes them in the end."""
    made = Party(exchange.store, f"file://{tmp_path}/meet")
    yield made
    made.close()


@pytest.fixture
def brief(between):
    """The same, where a region is soon taken for dead."""
    return lambda regions, **options: between(regions, TIMING, **options)
