"""States given to regions that come back, and removed when nobody needs them."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest
from regions.faults import vanish
from regions.party import SECRET, check, land, rounds, send, until

from lowcomm_jax.rounds import state_transfer
from lowcomm_jax.store.errors import Unreadable
from lowcomm_jax.store.records import State
from lowcomm_jax.store.secret import Seal

ARRAYS = {
    "anchor/w": np.arange(7, dtype=np.float32),
    "residual": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
    "clock": np.int32(3),
    "none": np.zeros((0, 2), np.float32),
}
DOCUMENT = {"schedule": {"next": 7}, "digests": ["a", "b"]}


def same(state, step, arrays=ARRAYS, document=DOCUMENT):
    """A state is the one given, bit for bit."""
    assert state is not None and state[0] == step and state[2] == document
    assert state[1].keys() == arrays.keys()
    for name, x in arrays.items():
        assert state[1][name].dtype == x.dtype
        np.testing.assert_array_equal(state[1][name], x)


def pieces(donor) -> list[str]:
    """Names of the pieces of all states that a region offers."""
    given = donor.state_transfer._given
    return [
        state_transfer._piece(slot, digest)
        for slot, record in given
        for array in record.arrays.values()
        for digest, _ in array.pieces
    ]


def test_who_asks_gets_a_state_of_now_and_gets_it_once(party):
    """An old one leads nowhere, and a new one every step would never be fetched whole."""
    first, second = party.run(2)
    assert second.state_transfer.newest() is None and not first.state_transfer.owed()
    first.state_transfer.give(3, ARRAYS, {})
    same(second.state_transfer.newest(), 3, document={})
    second.want_state()
    until(first.state_transfer.owed)
    assert second.state_transfer.newest() is None
    first.state_transfer.give(4, ARRAYS, DOCUMENT)
    assert not first.state_transfer.owed()
    same(second.state_transfer.newest(), 4)
    send([second], "k", takes_part=False)  # which says that it asks no longer
    until(lambda: not first.state_transfer.asking())
    # The job that takes its place has not been given anything yet.
    again = party.joined(1, 2)
    again.want_state()
    until(first.state_transfer.owed)
    first.state_transfer.give(10, ARRAYS, DOCUMENT)
    same(again.state_transfer.newest(), 10)


def test_the_lowest_that_does_not_ask_gives_and_the_next_one_when_it_is_gone(party):
    regions = party.run(4)
    for x in regions[::3]:
        x.want_state()
    until(regions[1].state_transfer.owed)
    until(
        lambda: (
            regions[0].state_transfer.donors() == {1, 2}
            and regions[1].state_transfer.asking().keys() == {0, 3}
        )
    )
    assert not any(x.state_transfer.owed() for x in (regions[0], *regions[2:]))
    vanish(regions[1])
    until(regions[2].state_transfer.owed)
    regions[2].state_transfer.give(5, ARRAYS, DOCUMENT)
    assert not regions[2].state_transfer.owed()
    for x in regions[::3]:
        same(x.state_transfer.newest(), 5)


def test_nobody_waits_for_a_region_that_asks_and_all_do_once_it_has_come_in(party):
    """Before its first payload. What was exchanged meanwhile it was not waited for in vain: else
    nobody would wait before it is past where they were, and where steps are short, it would run
    after them."""
    regions = party.run(2)
    regions[1].want_state()
    until(lambda: regions[0].state_transfer.asking().keys() == {1})
    regions[0].beat(9)
    regions[1].beat(5)  # what it has landed so far
    until(lambda: regions[0].steps()[1] == 5)
    send(regions[:1], "a")
    check(land(regions[:1], "a")[0], 2, [0])
    regions[1].come_in()
    assert regions[1].steps()[0] == 9 and not regions[0].state_transfer.asking()
    send(regions[:1], "b")
    time.sleep(0.3)
    assert not regions[0].ready("b")
    send(regions[1:], "b")
    check(land(regions[:1], "b")[0], 2, [0, 1])


def test_a_damaged_or_forged_newest_state_is_passed_over(party, monkeypatch):
    first, second = party.run(2)
    monkeypatch.setattr(state_transfer, "CHUNK_BYTES", 8)
    put = first._context.transport.put
    first.state_transfer.give(5, ARRAYS, DOCUMENT)
    first._context.transport.put = lambda name, data: put(name, data[:-1] + b"!")
    first.state_transfer.give(9, ARRAYS, {})
    key, record = "state/1/20.0.1.9.0", State(20, 0, 1, {}, {}, {})
    first._context.store.write(key, Seal("run", b"a secret of a stranger").close(key, record))
    same(second.state_transfer.newest(), 5)
    counts = second.counts()
    assert counts["rejected_state"] == 1 and counts["rejected_record"] == 1


@pytest.mark.parametrize("slot", ["state/1/9.0.1.0", "result/1"])
def test_a_state_that_is_signed_and_none_ends_who_reads_it(party, slot):
    """By one rule, whether it was given or left: another reader may take it for what it says."""
    first, second = party.run(2)
    key = f"{slot}.0"
    first._context.store.write(key, Seal("run", SECRET).close(key, {"colour": "blue"}))
    second.want_state()
    with pytest.raises(Unreadable, match=f"{key} is signed .* and cannot be read"):
        second.state_transfer.newest() if slot.startswith("state") else second.result()


def test_a_false_record_takes_a_number_of_a_state_and_not_its_slot(party):
    """And the record of the lowest number that holds is the state, whatever follows it."""
    first, second = party.run(2)
    key, store = "state/1/9.0.1.0", first._context.store
    store.write(f"{key}.0", Seal("run", b"a secret of a stranger").close(f"{key}.0", {}))
    first.state_transfer.give(9, ARRAYS, DOCUMENT)
    later = State(9, 0, 1, {}, {}, {})
    store.write(f"{key}.2", Seal("run", SECRET).close(f"{key}.2", later))
    same(second.state_transfer.newest(), 9)
    rounds([first, second], 0, 2)  # after which what nobody has given is removed
    same(second.state_transfer.newest(), 9)


def test_a_region_keeps_its_two_newest_states(party):
    first, second = party.run(2)
    for step in (1, 2, 3):
        first.state_transfer.give(step, ARRAYS, {"step": step})
    assert {name.split(".")[1] for name in pieces(first)} == {"2", "3"}
    assert second._context.store.list("state/1/") == [
        "state/1/2.0.1.1.0",
        "state/1/3.0.1.2.0",
    ]
    same(second.state_transfer.newest(), 3, document={"step": 3})


def left(region) -> set[tuple[int, int]]:
    """Of which step and donor a record or a piece of a state is stored."""
    store = region._context.store
    keys = [key.partition("/")[2].split(".") for key in store.list("blob/")]
    keys = [key for key in keys if len(key) == 6]
    keys += [["", *key.split("/")[2].split(".")] for key in store.list("state/")]
    return {(int(key[1]), int(key[2])) for key in keys}


def test_what_a_donor_leaves_that_dies_is_removed(party):
    """Whole states, and pieces of one that it was just giving."""
    regions = party.run(3)
    regions[2].want_state()
    until(regions[0].state_transfer.owed)
    regions[0].state_transfer.give(3, ARRAYS, DOCUMENT)
    regions[0]._context.transport.put(f"1.5.0.1.1.{'a' * 64}", b"a piece")
    vanish(regions[0])
    until(regions[1].state_transfer.owed)
    regions[1].state_transfer.give(6, ARRAYS, DOCUMENT)
    rounds(regions[1:2], 0, 1)
    # Somebody may still be fetching; what peers have not given died with them.
    stored = set() if regions[0]._context.transport.lingers else {(5, 0)}
    assert left(regions[1]) == {(3, 0), (6, 1)} | stored
    same(regions[2].state_transfer.newest(), 6)
    regions[2].come_in()
    regions[2].beat(1)  # past where it was waited for in vain
    until(lambda: regions[1]._context.wait_list.awaited(2))
    rounds(regions[1:], 1, 3)
    until(lambda: left(regions[1]) == {(6, 1)})


def test_what_was_given_in_our_place_before_is_removed(party):
    regions = party.run(2)
    regions[0].state_transfer.give(3, ARRAYS, DOCUMENT)
    regions[1].state_transfer.give(4, ARRAYS, DOCUMENT)
    vanish(regions[0])
    again = party.joined(0, 2)
    again.come_in()
    rounds([again, regions[1]], 0, 2)
    until(lambda: left(again) == {(4, 1)})


def test_who_asks_after_a_state_of_this_step_was_given_gets_one_too(party):
    """As at the end of a run, where the step stands still."""
    regions = party.run(3)
    for x in regions[1:]:
        x.want_state()
        until(regions[0].state_transfer.owed)
        regions[0].state_transfer.give(7, ARRAYS, DOCUMENT)
        same(x.state_transfer.newest(), 7)
    assert not regions[0].state_transfer.owed()


def test_who_is_only_coming_in_is_no_donor(party):
    """It may compile for long before it asks for a state itself."""
    regions = party.run(3)
    vanish(regions[0])
    until(lambda: regions[1].steps().keys() == {1, 2})
    again = party.joined(0, 3)
    regions[2].want_state()
    until(regions[1].state_transfer.owed)
    assert not again.state_transfer.owed()


def test_a_state_is_given_while_the_donor_goes_on(party):
    first, second = party.run(2)
    second.want_state()
    until(first.state_transfer.owed)
    put, going = first._context.transport.put, threading.Event()

    def slowly(*args):
        going.wait(5.0)
        return put(*args)

    first._context.transport.put = slowly
    first.give_state(7, ARRAYS, DOCUMENT)
    assert not first.state_transfer.owed() and second.state_transfer.newest() is None
    going.set()
    until(lambda: second.state_transfer.newest() is not None)
    same(second.state_transfer.newest(), 7)
