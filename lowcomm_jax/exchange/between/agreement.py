"""Which payloads an exchange may count, from what each region says that it holds."""

from __future__ import annotations

from collections.abc import Mapping

Holdings = Mapping[int, str]
"""What one region holds and has verified: the digest by region."""


def participants(published: Holdings, held: Mapping[int, Holdings]) -> list[int]:
    """The regions whose payloads every one of them holds, ascending.

    Then a region that dies, or whose payload was damaged on its way, takes nothing with it that
    the others need. While somebody lacks a payload, the one that the fewest hold is left out; of
    several, that of the highest region.

    Args:
      published: digests of the payloads.
      held: what each region holds that has said so; others are taken to hold everything, since
        they have no part in this decision and fetch later.
    """
    within = set(published)

    def holders(region: int) -> list[int]:
        return [by for by in within if by not in held or held[by].get(region) == published[region]]

    while lacking := [region for region in within if len(holders(region)) < len(within)]:
        within.remove(min(lacking, key=lambda region: (len(holders(region)), -region)))
    return sorted(within)
