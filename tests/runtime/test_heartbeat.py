"""When a region counts as dead: soon where beats come fast, later where they come slowly."""

import time

import pytest
from runtime.faults import vanish
from runtime.party import at_once, rounds, until

from lowcomm_jax.exchange import Timing
from lowcomm_jax.runtime.heartbeat import Beat, Heartbeat
from lowcomm_jax.runtime.kv import MetricsCounter, Store
from lowcomm_jax.runtime.secret import Seal

LOOK_S = 0.25


@pytest.fixture
def watch(tmp_path):
    """`watch(timing, pauses)`: region 1 beats after each of these pauses, in looks, and then no
    more; seconds from its last beat until region 0 takes it for dead."""

    def act(timing, pauses):
        store, seal = Store(f"file://{tmp_path}", "run", MetricsCounter()), Seal("run", b"")
        ours = Heartbeat(store, seal, 0, 2, timing)
        for counter, pause in enumerate((1, *pauses), 1):
            for _ in range(pause - 1):
                ours._look(LOOK_S)
            beat = Beat(incarnation=1, counter=counter)
            store.write("beat/1", seal.close("beat/1", vars(beat) | {"passes": {}}))
            ours._look(LOOK_S)
        silent = 0
        while 1 in ours.living():
            ours._look(LOOK_S)
            silent += 1
        return silent * LOOK_S

    return act


@pytest.mark.parametrize(
    "pauses, dead_after_s",
    [
        ([4] * 6, 4.0),  # a beat a second: as set
        ([8] * 6, 6.0),  # every two seconds: three times that
        ([4, 4, 9, 4, 4], 6.75),  # one was late
        ([9] + [4] * 8, 4.0),  # one was late, long ago
        ([15, 40, 100, 200], 64.0),  # never longer than 16 times
    ],
)
def test_patience_follows_the_gaps_between_beats(watch, pauses, dead_after_s):
    assert watch(Timing(beat_s=1.0, dead_after_s=4.0), pauses) == dead_after_s


def test_near_and_far():
    near, far = Timing.between("file:///x", deadline_s=7.0), Timing.between("s3://x")
    assert near.dead_after_s < 2 <= far.dead_after_s == Timing().dead_after_s
    assert near.deadline_s == 7.0 and not near.violations() and not far.violations()


def test_a_death_in_a_shared_folder_is_seen_within_two_seconds(store_party):
    """Later where the machine is so busy that beats come late."""
    regions = store_party.run(2, timing=Timing.between("file:///x"))
    until(lambda: all(x.living() == {0, 1} for x in regions))
    time.sleep(1.0)
    gaps = regions[0]._context.heartbeat._seen[1].gaps_s
    vanish(regions[1])
    began, late = time.monotonic(), 0.0
    while regions[0].living() != {0}:
        asleep = time.monotonic()
        assert asleep - began < 30
        time.sleep(0.05)
        late = max(late, time.monotonic() - asleep - 0.05)
    busy = max(gaps) > 0.65 or late > 0.1
    assert time.monotonic() - began < (4.0 + 3 * max(gaps) if busy else 2.0)


def test_eight_regions_exchange_and_two_die(store_party):
    regions = store_party.run(8, timing=Timing(beat_s=0.2, dead_after_s=2.0, answer_s=2.0))
    rounds(regions, 0, 2)
    at_once(vanish, regions[6:])
    rounds(regions[:6], 2, 4)
