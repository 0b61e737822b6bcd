"""Jobs, four or eight: they end with the bits of one process; killing two costs only their steps.

Nano is the smallest preset; the quick test trains it with one narrow layer.
"""

import signal
import time

import pytest
from launched import assert_logged_once, entered, kill, landings, reached, start

from experiments.__main__ import main
from experiments.report.runlog import read_run, summarise

REGIONS = 4
PERIOD = 6
REJOIN_SECONDS = 30  # from the death of a region until it is in the run again, beside a start
SOON = 10  # exchanges after a region came in, until one counts it: on a busy machine
LENGTH = 16  # tokens a region and step: one short sequence


def shared(tiny, root, model, steps, *more, regions=REGIONS):
    """What `train` and `launch` are both given."""
    given = tiny.arguments(root)
    if model == "nano":
        given = [argument for argument in given if not argument.startswith("--config.model.")]
    return [
        "--config=diloco",
        *given,
        f"--config.regions={regions}",
        f"--config.method.period={PERIOD}",
        f"--config.steps={steps}",
        "--config.batch=1",
        f"--config.data.seq_len={LENGTH}",
        *more,
    ]


def folder(workdir, region):
    return workdir / f"region{region}"


def own(workdir, regions=REGIONS):
    """What every region wrote of itself."""
    return [read_run(folder(workdir, region)) for region in range(regions)]


def anchors(run):
    """Loss of the anchor by step."""
    return {record["step"]: record["anchor"] for record in run.evals}


@pytest.mark.slow
@pytest.mark.parametrize("model, regions", [("nano", 4), ("narrow", 8)])
def test_jobs_end_with_the_bits_of_one_process(model, regions, tiny, root):
    # Not a whole number of periods: the last synchronisation has something to exchange.
    rounds, steps = 4, 4 * PERIOD + 3
    every = ("--config.log.every=6", "--config.eval.every=12")
    given = shared(tiny, root, model, steps, *every, regions=regions)
    names = {kind: root / f"{model}{regions}-{kind}" for kind in ("jobs", "alone")}
    assert main(["launch", "--exchange=peers", *given, f"--workdir={names['jobs']}"]) == 0
    assert main(["train", *given, "--quiet", f"--workdir={names['alone']}"]) == 0
    jobs, alone = read_run(names["jobs"]), read_run(names["alone"])

    wanted = anchors(alone)
    assert list(wanted) == [0, 12, 24, steps] and len(set(wanted.values())) == 4
    for region in own(names["jobs"], regions):
        assert region.end["step"] == steps and anchors(region) == wanted
    assert [event["participants"] for event in landings(jobs)] == [[True] * regions] * rounds
    assert [step["loss"] for step in jobs.steps] == [step["loss"] for step in alone.steps]
    # The last sequence of an epoch is filled with padding, which is masked.
    tokens, given = summarise(alone).tokens, steps * regions * LENGTH
    assert summarise(jobs).tokens == tokens and 0.99 * given < tokens <= given
    # Dense fp32 in slices: those of the others to them, and the average of one's own to each.
    once = 2 * (regions - 1) * 4 * jobs.header["params"] // regions
    sent = [(rounds + 1) * once] * regions
    assert jobs.end["bytes_sent"] == alone.end["bytes_sent"] == sent


def said(launcher, workdir, regions, text, seconds):
    """Seconds until each of these regions has printed a text, by region."""
    began, found = time.monotonic(), {}
    while len(found) < len(regions):
        for region in set(regions) - set(found):
            output = folder(workdir, region) / "output.txt"
            if output.is_file() and text in output.read_text():
                found[region] = time.monotonic() - began
        assert launcher.poll() is None, f"all was over before {text!r}: give it more steps"
        assert time.monotonic() - began < seconds, f"{text!r} only of {found}"
        time.sleep(0.05)
    return found


def from_the_first_of_all(run, at, regions):
    """Exchanges after step `at`, from the first one that counted everyone: all of them do. Before
    it the others may be further on than the newcomer had read, by a few exchanges."""
    counted = [e["participants"] == [True] * regions for e in landings(run) if e["step"] > at]
    first = counted.index(True)
    assert first <= SOON and all(counted[first:])
    return counted[first:]


def assert_only_the_lost_missed_steps(workdir, steps, came):
    """Of regions that were lost and came in at a step (`came`, by region), and of the others."""
    runs, together = own(workdir), read_run(workdir)
    assert [run.end["step"] for run in runs] == [steps] * REGIONS
    stayed = [region for region in range(REGIONS) if region not in came]
    for region in stayed:
        assert [step["step"] for step in runs[region].steps] == list(range(1, steps + 1))
        assert all(event["participants"] == [True] for event in landings(runs[region]))
    for region, at in came.items():
        assert_logged_once(folder(workdir, region), at)
        assert len(from_the_first_of_all(runs[region], at, 1)) >= 25
    # Rounds of those who stayed alone, and after them only such as counted everyone.
    alone = [region in stayed for region in range(REGIONS)]
    assert any(event["participants"] == alone for event in landings(together))
    from_the_first_of_all(together, max(came.values()), REGIONS)
    # One anchor, wherever it was evaluated: by the lost ones before and after, too.
    everywhere = anchors(runs[stayed[0]])
    for region, run in enumerate(runs):
        found = anchors(run)
        assert found == {step: everywhere[step] for step in found}, region
        assert min(found) == 0 and max(found) == steps and len(found) >= 4


@pytest.mark.slow
def test_two_killed_at_once_come_back_while_the_others_train_on(tiny, root):
    """They are in the run again within 30 s, beside what starting a process takes here."""
    steps, workdir, lost = 2000, root / "killed", (0, REGIONS - 1)
    given = shared(tiny, root, "nano", steps, "--config.log.every=10", f"--workdir={workdir}")
    launcher = start("launch", "--exchange=peers", "--restarts=1", *given)
    # How long four starts take, compiling aside: the measure of how busy it is.
    starting = max(said(launcher, workdir, range(REGIONS), "waits for", 200).values())
    for region in lost:
        reached(launcher, folder(workdir, region), 60)
    kill(launcher, *(folder(workdir, region) for region in lost))
    back = said(launcher, workdir, lost, "came into the run", 200)
    shown = launcher.communicate(timeout=400)[0]
    assert launcher.returncode == 0, shown
    assert shown.count("it is started again, 0 restarts are left") == len(lost)
    assert shown.count(f"ended with code {-signal.SIGKILL}") >= len(lost), shown
    assert max(back.values()) < REJOIN_SECONDS + starting, (back, starting)
    print(f"in the run again after {back} s, of which a start takes {starting:.1f} s")
    came = {r: entered((folder(workdir, r) / "output.txt").read_text()) for r in lost}
    assert_only_the_lost_missed_steps(workdir, steps, came)
