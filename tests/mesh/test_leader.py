"""The processes of a job go the same way, and end together."""

import contextlib
import threading

import jax
import numpy as np
import pytest
from processes_in_threads import leaders, together

from lowcomm_jax import make_mesh
from lowcomm_jax.interrupt import InterruptedBeforeError
from lowcomm_jax.mesh.arrays import fetch, fetch_boxes, place
from lowcomm_jax.mesh.leader import ProcessLostError, leader, opened
from lowcomm_jax.mesh.regions import Regions


@pytest.fixture(autouse=True)
def promotion():
    """In the place of conftest.py's: nothing here may promote dtypes unasked."""


@pytest.fixture
def job():
    made = leaders(3)
    yield made
    for one in made:
        one._channel.close()


class OddError(Exception):
    """One that cannot be pickled as it is."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def test_a_single_process_does_everything_itself():
    alone = leader()
    assert alone is opened() and alone.leads and alone.count == 1
    assert alone.broadcast_from_leader("x", lambda: 3) == 3 and alone.everyones("y", 4) == [4]
    with pytest.raises(KeyError), alone.together():
        raise KeyError


def test_the_first_one_decides_and_all_learn_it(job):
    calls = []

    def act(one):
        def decide():
            calls.append(one.index)
            inner = one.broadcast_from_leader("a part of it", lambda: np.arange(3.0))
            return {"at": one.index, "array": inner}

        return [
            one.broadcast_from_leader("first", decide),
            one.broadcast_from_leader("second", lambda: one.index),
        ]

    for first, second in together(act, job):
        assert first["at"] == second == 0
        np.testing.assert_array_equal(first["array"], np.arange(3.0))
    assert calls == [0]


@pytest.mark.parametrize("error", [KeyError("k"), OddError(1, 2)], ids=["plain", "unpicklable"])
def test_an_error_of_a_decision_is_raised_in_all(job, error):
    def act(one):
        def decide():
            raise error

        return one.broadcast_from_leader("fails", decide)

    found = together(act, job)
    assert found[0] is error
    for other in found[1:]:
        assert str(error) in str(other)
    assert together(lambda one: one.broadcast_from_leader("next", lambda: 7), job) == [7, 7, 7]


def test_what_a_signal_raises_in_a_decision_is_raised_in_all(job):
    def act(one):
        def decide():
            raise InterruptedBeforeError("SIGTERM")

        with pytest.raises(InterruptedBeforeError, match="SIGTERM"):
            one.broadcast_from_leader("waits", decide)
        return one.broadcast_from_leader("next", lambda: 7)

    assert together(act, job) == [7, 7, 7]


def test_everyones_values_in_order(job):
    values = together(lambda one: one.everyones("index", 10 * one.index), job)
    assert values == [[0, 10, 20]] * 3


def test_another_program_is_named(job):
    def act(one):
        return one.broadcast_from_leader("left" if one.index == 1 else "right", lambda: 1)

    found = together(act, job)
    assert found[0] == found[2] == 1
    assert "process 1 is at 'left', process 0 of its job at 'right'" in str(found[1])


def test_an_end_is_an_error_in_all_others_even_while_the_first_waits(job):
    waits, failure = threading.Event(), []
    job[0].on_failure(lambda error: (failure.append(error), waits.set()))

    def act(one):
        if one.index == 1:
            one._channel.close()
            return None

        def decide():
            assert waits.wait(20)
            one.check()

        with one.together():
            return one.broadcast_from_leader("waits", decide)

    found = together(act, job)
    for one in (found[0], found[2]):
        assert isinstance(one, ProcessLostError)
        assert "process 1 of this job has ended" in str(one)
    assert isinstance(failure[0], ProcessLostError)


def test_an_error_of_one_is_named_in_all_and_they_go_on_in_step(job):
    def act(one):
        try:
            with one.together():
                one.broadcast_from_leader("before", lambda: 1)
                if one.index == 2:
                    raise OSError("disk full")
                while True:
                    one.broadcast_from_leader("steps", lambda: None)
        except (ProcessLostError, OSError) as error:
            return (
                error,
                one.broadcast_from_leader("after", lambda: 5),
                one.everyones("all", one.index),
            )

    for one, (error, after, everyone) in zip(job, together(act, job)):
        assert "disk full" in str(error) and (after, everyone) == (5, [0, 1, 2])
        if one.index == 0:
            assert "process 2 of this job failed: OSError" in str(error)
            assert isinstance(error.__cause__, OSError)


def test_what_was_told_before_an_error_is_no_answer_to_what_is_asked_after_it(job):
    def act(one):
        with contextlib.suppress(OSError, ProcessLostError), one.together():
            if one.leads:
                raise OSError("disk full")
            one.everyones("before", "old")
        return one.everyones("all", one.index)

    assert together(act, job) == [[0, 1, 2]] * 3


def test_the_same_error_in_all_stays_what_it_is(job):
    def act(one):
        try:
            with one.together():
                raise ZeroDivisionError
        except ZeroDivisionError:
            return one.broadcast_from_leader("after", lambda: 5)

    assert together(act, job) == [5, 5, 5]


def test_signals_are_passed_on_to_the_first(job):
    heard = []
    there = threading.Event()
    job[0].on_signal(lambda number: (heard.append(number), there.set()))
    job[2].pass_on(15)
    assert there.wait(10) and heard == [15]


def test_arrays_of_one_process():
    sharding = Regions(1, make_mesh(fsdp=2)).sharding("fsdp")
    tree = {"a": np.arange(4.0, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
    placed = place(tree, sharding)
    assert all(x.sharding == sharding for x in placed.values())
    for name, x in fetch(placed).items():
        np.testing.assert_array_equal(x, tree[name])
    assert fetch(placed, here=False) == {}


def test_what_was_fetched_is_no_view_of_what_a_device_may_donate():
    held = {"x": jax.device_put(np.arange(3.0, dtype=np.float32), jax.devices()[0])}
    (box,) = fetch_boxes(held, leads=True)["x"]
    for found in (fetch(held)["x"], box.values):
        assert found.flags.owndata and found.tolist() == [0.0, 1.0, 2.0]
