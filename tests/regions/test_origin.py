"""When a run began: what faults by time count from."""

import json
import time

from regions.party import at_once

from experiments.faults import fault_hooks
from experiments.faults.fault import Fault
from experiments.faults.fault_hooks import ScriptedFaults
from experiments.faults.origin import agreed, noted
from experiments.workdir import METRICS


def test_all_regions_agree_and_a_log_keeps_it(store_party, tmp_path):
    regions = store_party.run(2)
    before = time.time()
    one, other = at_once(lambda x: agreed(x, tmp_path / "new"), regions)
    assert before <= one == other <= time.time()
    (tmp_path / METRICS).write_text(json.dumps({"kind": "header", "began": 5.0}) + "\n{}\n")
    assert noted(tmp_path) == 5.0
    # It stands: a region that comes later has no say, whatever its log tells.
    assert agreed(regions[1], tmp_path) == one


def test_a_run_that_goes_on_began_when_it_did(store_party, tmp_path):
    (tmp_path / METRICS).write_text(json.dumps({"kind": "header", "began": 5.0}) + "\n")
    assert agreed(store_party.run(1)[0], tmp_path) == 5.0
    (tmp_path / METRICS).write_text('{"kind": "head')  # it was killed while it wrote
    assert noted(tmp_path) is None


def test_payloads_are_damaged_by_time():
    scripted = ScriptedFaults([Fault(None, "corrupt", 1, time=2, seconds=3)], 1)
    payload, flipped = b"\0\0\0", b"\0\1\0"
    scripted.begins("1", {"step": 7})
    assert scripted.sent("1", payload) == payload  # nobody knows yet when it began
    for ago, wanted in ((1.0, payload), (2.5, flipped), (5.5, payload)):
        scripted.began = time.time() - ago
        assert scripted.sent("1", payload) == wanted
    other = ScriptedFaults([Fault(None, "corrupt", 1, time=2, seconds=3)], 0)
    other.begins("1", {"step": 7})
    other.began = time.time() - 2.5
    assert other.sent("1", payload) == payload


def test_only_newer_exchanges_are_remembered(monkeypatch):
    monkeypatch.setattr(fault_hooks, "_REMEMBERED", 2)
    scripted = ScriptedFaults([Fault(1, "corrupt", 0, steps=9)], 0)
    for step in (1, 2, 3):
        scripted.begins(f"key{step}", {"step": step})
    payload, flipped = b"\0\0\0", b"\0\1\0"
    found = [scripted.sent(f"key{step}/slices", payload) for step in (1, 2, 3)]
    assert found == [payload, flipped, flipped]


def test_a_straggler_holds_up_its_own_steps(monkeypatch):
    slept = []
    monkeypatch.setattr(fault_hooks.time, "sleep", slept.append)
    faults = [Fault(3, "straggle", 1, steps=2, delay=0.25), Fault(3, "late", 1, steps=2, delay=9.0)]
    for region in (0, 1):
        for step in range(1, 7):
            ScriptedFaults(faults, region).steps(step)
    assert slept == [0.25, 0.25]


def test_a_slow_link_carries_so_many_megabits_a_second(monkeypatch):
    slept = []
    monkeypatch.setattr(fault_hooks.time, "sleep", slept.append)
    scripted = ScriptedFaults([Fault(3, "slow", 1, steps=2, mbit=2.0)], 1)
    for step in (2, 3):
        scripted.begins(f"{step}", {"step": step})
        assert scripted.sent(f"{step}", bytes(500_000)) == bytes(500_000)
        scripted.received(f"{step}", 250_000)
    assert slept == [2.0, 1.0], "seconds: 4 and 2 megabits"


def test_an_older_payload_of_its_size_is_sent_again():
    scripted = ScriptedFaults([Fault(3, "replay", 1, steps=3)], 1)
    sent = [b"one", b"four", b"two", b"six", b"ten"]
    for step, payload in enumerate(sent, 1):
        scripted.begins(f"{step}", {"step": step})
        sent[step - 1] = scripted.sent(f"{step}", payload)
    assert sent == [b"one", b"four", b"one", b"two", b"six"]
