"""The device is handed two seconds of steps at a time, and numbers do not depend on it."""

import numpy as np
import optax
import pytest
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.train import batch_blocks
from lowcomm_jax.train.batch_blocks import BlockStager, DispatchLimit


class Device:
    """Does one block after the other; each step takes `each` seconds of a clock that we turn."""

    def __init__(self, monkeypatch, each):
        self.now, self.free, self.each, self.furthest = 0.0, 0.0, each, 0.0
        monkeypatch.setattr(batch_blocks.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(batch_blocks.jax, "block_until_ready", self.wait)

    def wait(self, result):
        self.now = max(self.now, result.end)

    def run(self, steps, dispatch_s=0.001):
        self.now += dispatch_s
        self.free = max(self.free, self.now) + steps * self.each
        self.furthest = max(self.furthest, self.free - self.now)
        return Result(self, self.free)


class Result:
    def __init__(self, device, end):
        self.device, self.end = device, end

    def is_ready(self):
        return self.device.now >= self.end


def train(device, limit, blocks, most=16):
    taken = []
    for _ in range(blocks):
        taken.append(limit.room(most))
        limit.handed_over(taken[-1], device.run(taken[-1]))
    return taken


def test_slow_steps_are_handed_over_two_seconds_at_a_time(monkeypatch):
    device, limit = Device(monkeypatch, 0.4), DispatchLimit()
    first, *others = train(device, limit, 12)
    assert first == 1 and set(others) <= {4, 5}  # a call takes a little, too
    assert device.furthest <= 2.01


def test_a_step_longer_than_that_is_handed_over_by_itself(monkeypatch):
    device, limit = Device(monkeypatch, 3.0), DispatchLimit()
    assert train(device, limit, 5) == [1] * 5
    assert device.furthest <= 3.01  # nothing ahead of it


def test_fast_steps_fill_their_blocks_and_nobody_waits_for_each(monkeypatch):
    device, limit = Device(monkeypatch, 0.002), DispatchLimit()
    waits = []
    monkeypatch.setattr(
        batch_blocks.jax, "block_until_ready", lambda x: (waits.append(1), device.wait(x))
    )
    assert train(device, limit, 200) == [1] + [16] * 199
    assert device.furthest <= 2.01
    assert len(waits) < 200  # only where a second of work is under way


def test_steps_that_become_slower_or_faster_are_noticed(monkeypatch):
    device, limit = Device(monkeypatch, 0.1), DispatchLimit()
    assert train(device, limit, 60)[-1] == 16
    device.each = 0.5
    assert train(device, limit, 10)[-1] in (3, 4)
    device.each = 0.01
    assert train(device, limit, 20)[-1] == 16


def test_a_program_that_ends_before_its_call_returns_is_timed_too(monkeypatch):
    device, limit = Device(monkeypatch, 0.0), DispatchLimit()
    taken = []
    for _ in range(6):
        taken.append(limit.room(16))
        limit.handed_over(taken[-1], device.run(0, dispatch_s=0.5 * taken[-1]))
    assert taken[-1] == 4


def test_blocks_hold_at_least_a_step_of_a_batch_that_is_cut():
    batches = [np.zeros((2, 12, 3))] * 3
    block = BlockStager(batches, 16, 3).take(5, room=1)
    assert (block.steps, block.stride) == (1, 4)
    assert BlockStager(batches, 16, 3).take(5, room=9).steps == 2
    assert BlockStager([np.zeros((2, 4, 3))] * 9, 16).take(8, room=3).steps == 3


@pytest.mark.parametrize(
    "method", [lc.methods.diloco(7), lc.methods.streaming_diloco(6, 2, 2, 0.5)]
)
def test_numbers_are_those_of_whole_blocks(method, monkeypatch):
    def losses(room):
        monkeypatch.setattr(DispatchLimit, "room", lambda self, capacity: room)
        engine = lc.Engine(loss_fn, optax.adam(0.1), method, 2)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(20, 2, 4, 3)).astype(np.float32)
        batches = [{"x": one, "y": one.sum(-1)} for one in x]
        state, history = engine.run(
            engine.init({"a": np.ones(2, np.float32), "b": np.ones(1, np.float32)}), batches
        )
        return np.asarray(history["loss"]), np.asarray(lc.global_params(state)["a"])

    for one, other in zip(losses(3), losses(16)):
        np.testing.assert_array_equal(one, other)
