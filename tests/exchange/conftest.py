"""The transports between jobs, each under the same contract."""

import pytest
from exchange.party import Party

from lowcomm_jax import exchange

KINDS = {"store": exchange.store, "peers": exchange.peers}


@pytest.fixture(params=KINDS)
def party(request, tmp_path):
    """Makes regions that meet in an empty folder, and closes them in the end."""
    made = Party(KINDS[request.param], f"file://{tmp_path}/meet")
    yield made
    made.close()
