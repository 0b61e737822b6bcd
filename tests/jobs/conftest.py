"""Jobs that meet in a temporary folder."""

import pytest

from lowcomm_jax import exchange


@pytest.fixture
def between(tmp_path):
    """`between(regions)(region)`: that region's exchange, joined."""

    def of(regions):
        def make(region):
            made = exchange.store(f"file://{tmp_path}", region, regions, "run")
            made.join(60)
            return made

        return make

    return of
