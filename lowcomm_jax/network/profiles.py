"""Remember how collectives run alone, so that a repeated exchange costs the clock a look-up."""

import numpy as np

from lowcomm_jax.network.accounts import usage_of
from lowcomm_jax.network.collectives import Profile, profile
from lowcomm_jax.network.links import Network

LIMIT = 4096  # random pairs and adapting sizes must not grow without bound


class ProfileCache:
    """Collectives of one network, computed once each."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._known: dict[tuple, tuple[Profile, dict, np.ndarray]] = {}

    def get(
        self,
        route: str,
        sizes: tuple[float, ...],
        team: tuple[int, ...],
        listeners: tuple[int, ...] = (),
    ) -> tuple[Profile, dict, np.ndarray]:
        """Give a collective's profile, its share of each resource, and its members' sending rates.

        Arguments as in `collectives.profile`, as tuples.

        Raises:
            ValueError: see `routes.check`.
        """
        key = (route, sizes, team, listeners)
        found = self._known.get(key)
        if found is None:
            shape = profile(self.network, route, sizes, team, listeners)
            if len(self._known) >= LIMIT:
                self._known.clear()
            found = self._known[key] = (shape, *usage_of(self.network, shape))
        return found
