"""What the launcher does to jobs by a script, with jobs that only note it."""

import json
import os
import signal
import time

import pytest

from experiments.faults import injector
from experiments.faults.fault import Fault
from experiments.faults.injector import Injector
from experiments.faults.rendezvous_cut import reconnect_region, region_link
from experiments.workdir import METRICS

KILL, STOP, GO = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT


class Target:
    """A region that notes what is done to it."""

    def __init__(self, folder, region):
        self.workdir = folder / f"region{region}"
        self.workdir.mkdir()
        self.held, self.code, self.done = False, None, []
        self.at(0)

    def at(self, step, **header):
        """Its log reaches to this step."""
        records = [{"kind": "header", **header}, {"kind": "step", "step": step}]
        (self.workdir / METRICS).write_text("".join(json.dumps(r) + "\n" for r in records))

    def start(self):
        self.done.append("start")

    def signal(self, number):
        self.done.append(number)

    def impostor(self):
        return self


@pytest.fixture
def run(tmp_path):
    """Three regions, and `inject(*faults)`."""
    rendezvous = tmp_path / "rendezvous"
    rendezvous.mkdir()
    targets = [Target(tmp_path, region) for region in range(3)]
    for region in range(3):
        reconnect_region(rendezvous, region)

    def inject(*faults):
        injecting = Injector(faults, targets, rendezvous)
        everyone(targets, 1)
        return injecting

    return targets, rendezvous, inject


def everyone(targets, step):
    for target in targets:
        target.at(step)


def test_begins_and_ends_as_the_furthest_goes_on(run):
    targets, rendezvous, inject = run
    faults = [Fault(4, "stop", 1, steps=3), Fault(5, "partition", 2, steps=9)]
    injecting = inject(*faults, Fault(4, "late", 0, steps=3, delay=1.0))
    assert not injecting.act(False) and not targets[1].done
    targets[0].at(4)
    assert injecting.act(False) == ["step 4: stop of region 1 begins"]
    assert targets[1].done == [STOP] and targets[1].held
    targets[0].at(7)
    assert len(injecting.act(False)) == 2
    assert targets[1].done == [STOP, GO] and not targets[1].held and targets[2].held
    assert os.path.realpath(region_link(rendezvous, 2)) == os.devnull
    targets[0].at(14)
    injecting.act(False)
    assert region_link(rendezvous, 2).resolve() == rendezvous and not targets[2].held


def test_strikes_only_who_is_in_the_run_and_leaves_somebody(run):
    targets, _, inject = run
    injecting = inject(
        Fault(4, "kill", 0, steps=2), Fault(5, "kill", 1, steps=4), Fault(6, "stop", 2, steps=4),
        Fault(7, "kill", 0, steps=2),
    )  # fmt: skip
    targets[2].at(4)
    injecting.act(False)
    targets[2].at(5)
    injecting.act(False)
    assert targets[0].done == [KILL] and targets[1].done == [KILL]
    targets[2].at(8)
    injecting.act(False)
    # 0 is started again, and not there yet: neither it nor the last one gets a fault.
    assert targets[0].done == [KILL, "start"] and not targets[2].done
    targets[2].at(30)
    injecting.act(False)
    assert targets[1].done == [KILL, "start"] and not targets[2].done
    targets[0].at(30)
    said = injecting.act(False)
    assert said == ["step 30: stop of region 2 begins"] and targets[2].done == [STOP]
    targets[0].at(33)
    assert not injecting.act(False)  # it lasts as long as it was to
    targets[0].at(34)
    targets[2].at(33)
    assert injecting.act(False) == ["step 34: stop of region 2 ends"]
    targets[2].at(35)
    assert injecting.act(False) == ["step 35: kill of region 0 begins"]


@pytest.mark.parametrize(
    "left, well",
    [
        (["epoch/1.0", "result/1.0"], True),
        (["epoch/9.0", "epoch/10.1", "epoch/x", "result/10.0", "result/10/ab"], True),
        (["epoch/1.0", "epoch/2.0", "result/1.0"], False),
        (["epoch/1.0", "result/1/ab"], False),
        ([], False),
    ],
)
def test_who_was_to_come_back_takes_the_result_if_there_is_one(run, left, well):
    targets, rendezvous, inject = run
    for name in left:
        (rendezvous / "id" / name).parent.mkdir(parents=True, exist_ok=True)
        (rendezvous / "id" / name).touch()
    injecting = inject(
        Fault(4, "kill", 0), Fault(5, "kill", 1, steps=99), Fault(6, "stop", 1, steps=1)
    )
    everyone(targets, 5)
    injecting.act(False)
    said = injecting.act(True)
    assert "the run is over without region 0" in said[0]
    assert ("kill of region 1 ends" if well else "over without region 1") in said[1]
    assert said[2] == "stop of region 1 never came: the run is over"
    # One was to stay dead; that the other one could not come back is a loss.
    assert [target.code for target in targets[:2]] == [0, None if well else -KILL]
    assert not any(target.held for target in targets)
    assert targets[0].done == [KILL] and targets[1].done == [KILL, *["start"] * well]
    assert not injecting.act(True)


def test_one_outage_after_the_other(run):
    targets, rendezvous, inject = run
    injecting = inject(Fault(4, "outage", seconds=0.05), Fault(5, "outage", seconds=0.05))
    everyone(targets, 5)
    assert injecting.act(False) == ["step 5: outage begins"] and rendezvous.is_file()
    assert not injecting.act(False)
    time.sleep(0.06)
    assert injecting.act(False) == ["step 5: outage ends", "step 5: outage begins"]
    injecting.end_all()
    assert rendezvous.is_dir()


def test_who_was_killed_stays_dead_when_the_launcher_stops(run):
    targets, _, inject = run
    injecting = inject(Fault(4, "kill", 0, steps=9), Fault(4, "stop", 1, steps=9))
    everyone(targets, 4)
    injecting.act(False)
    injecting.end_all()
    assert targets[0].done == [KILL] and targets[1].done == [STOP, GO]


def test_by_time_since_the_run_began(run):
    targets, _, inject = run
    injecting = inject(Fault(None, "stop", 1, seconds=0.5, time=10))
    targets[0].at(500)
    assert not injecting.act(False)  # it is not known when that was
    targets[0].at(1, began=time.time() - 9.5)
    assert not injecting.act(False)
    time.sleep(0.6)
    assert injecting.act(False) == ["step 1: stop of region 1 begins"] and not injecting.act(False)
    time.sleep(0.5)
    assert injecting.act(False) == ["step 1: stop of region 1 ends"]


def test_what_was_over_when_a_run_was_interrupted_is_not_done_again(run):
    targets, _, inject = run
    everyone(targets, 20)
    injecting = inject(
        Fault(4, "kill", 0, steps=2), Fault(5, "outage", seconds=1), Fault(15, "stop", 1, steps=9)
    )
    everyone(targets, 20)
    assert injecting.act(False) == ["step 20: stop of region 1 begins"]


def test_nobody_waits_for_steps_that_nobody_makes(run, monkeypatch):
    targets, _, inject = run
    injecting = inject(Fault(4, "stop", 0, steps=5), Fault(4, "kill", 1))
    everyone(targets, 4)
    assert len(injecting.act(False)) == 2 and not injecting.act(False)
    monkeypatch.setattr(injector, "_PATIENCE_SECONDS", -1.0)
    assert injecting.act(False) == ["step 4: stop of region 0 ends"]


def test_a_full_disk_is_found_at_the_next_landing_and_room_is_made_before_the_job_starts(run):
    targets, _, inject = run
    path = targets[1].workdir / "landings.jsonl"
    path.write_text("seen\n")
    injecting = inject(Fault(4, "full_disk", 1, steps=3), Fault(20, "full_disk", 1, steps=9))
    everyone(targets, 4)
    assert injecting.act(False) == ["step 4: full_disk of region 1 begins"] and targets[1].held
    with pytest.raises(OSError, match="No space left"), path.open("a") as file:
        file.write("more\n")
    everyone(targets, 7)
    injecting.act(False)
    assert targets[1].done == [KILL, "start"] and path.read_text() == "seen\n"
    assert not path.is_symlink() and not targets[1].held
    everyone(targets, 20)
    injecting.act(False)
    injecting.end_all()
    assert path.read_text() == "seen\n"


def test_a_job_with_another_seed_is_beside_the_region_and_stays_until_it_was_there(run):
    targets, _, inject = run
    targets[1].output = lambda: targets[1].workdir / "output.txt"
    injecting = inject(Fault(4, "seed", 1, steps=3))
    everyone(targets, 4)
    injecting.act(False)
    assert targets[1].done == ["start"] and not targets[1].held
    everyone(targets, 9)
    assert not injecting.act(False)
    targets[1].output().write_text("region 1 waits for the others ...\n")
    assert injecting.act(False) == ["step 9: seed of region 1 ends"]
    assert targets[1].done == ["start", KILL] and injecting.progress.startswith("1 of 1")
