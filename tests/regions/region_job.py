"""One region as a job of its own: exchanges one key after another and prints what arrives."""

import json
import sys
import time

from regions.party import KINDS, LIKE, SECRET, listen_to, payload

from lowcomm_jax import exchange
from lowcomm_jax.store import wire


def main(kind: str, url: str, region: int, count: int, last: int) -> None:
    """Exchange keys up to `last` - 1, or from where the others are; one JSON line a key."""
    one = KINDS[kind](url, region, count, "run", SECRET)
    one.join(60.0)
    number = max(0, *one.steps().values())
    tell(event="joined", living=sorted(one.steps()), number=number)
    while number < last:
        one.beat(number)
        try:
            arrived = listen_to(one, f"{number}", LIKE)
            if arrived is None:
                one.start(f"{number}", payload(region, number))
                arrived = one.finish(f"{number}")
        except exchange.Lost:
            # It slept for too long: here a training job would take a state.
            number = max(one.steps().values())
            continue
        digest = wire.digest(b"".join(x.tobytes() for _, x in sorted(arrived.arrays.items())))
        part = [r for r in range(count) if arrived.participants[r]]
        tell(event="landed", number=number, part=part, digest=digest, seconds=arrived.seconds)
        if region in part:
            time.sleep(0.05)
        number += 1
    one.close()
    tell(event="closed", counts=one.counts())


def tell(**what) -> None:
    """One line of JSON for the test."""
    print(json.dumps({**what, "time": time.time()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
