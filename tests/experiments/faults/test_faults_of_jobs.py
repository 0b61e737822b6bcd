"""Scripted faults of real jobs: what is left of a run, and that one process ends where it did."""

import collections
import re
import shutil
import subprocess
import time

import jax
import numpy as np
import pytest
import yaml
from launched import start
from scipy import special

from experiments.__main__ import main
from experiments.faults.fault import Fault
from experiments.faults.happened import FILE, Settings, parsed
from experiments.faults.scripts import at_random, read, write
from experiments.regions.main import SCRIPT
from experiments.report.runlog import read_run
from experiments.trained.anchor import load_trained

PERIOD = 6
EVERY_KIND = [
    Fault(60, "kill", 1, steps=240),
    Fault(900, "stop", 2, steps=150),
    Fault(1200, "corrupt", 0, steps=30),
    Fault(1215, "late", 1, steps=12, delay=1.0),
    Fault(1260, "slow", 2, steps=12, mbit=1.0),
    Fault(1500, "partition", 0, steps=200),
    Fault(2400, "outage", seconds=9.0),
]


def far_apart(regions, steps):
    """Links between distant places, and steps like those of a real model: without them those that
    are left make thousands of steps while a region is started again, or the folder is away, and are
    done before it has come back."""
    return [
        fault
        for region in range(regions)
        for fault in (
            Fault(1, "late", region, steps=steps, delay=0.15),
            Fault(1, "straggle", region, steps=steps, delay=0.02),
        )
    ]


def arguments(tiny, root, name, regions, steps, *more, config="diloco"):
    """Of `train` and `launch`; a rejoined region's moments are fresh without checkpoints."""
    return [
        f"--config={config}",
        *tiny.arguments(root),
        f"--config.regions={regions}",
        f"--config.method.period={PERIOD}",
        f"--config.steps={steps}",
        "--config.batch=1",
        "--config.data.seq_len=16",
        "--config.log.every=10",
        "--config.eval.every=500",
        "--config.checkpoint.every=0",
        f"--workdir={root / name}",
        *more,
    ]


def launched(seconds, *given):
    launcher = start("launch", *given)
    try:
        shown = launcher.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        launcher.terminate()
        pytest.fail(launcher.communicate()[0])
    assert launcher.returncode == 0, shown
    return shown


def losses(workdir):
    """Of the anchor, by step."""
    return {record["step"]: record["anchor"] for record in read_run(workdir).evals}


def assert_as_in_one_process(tiny, root, name, regions, steps, **config):
    """All regions end, and with the anchor of a simulation that is told what happened: the same
    parameters, bit for bit, and the same losses wherever they were looked at. Returns what did."""
    script = f"--config.faults={root / name / FILE}"
    again = f"{name}-again"
    given = arguments(tiny, root, again, regions, steps, script, "--quiet", **config)
    assert main(["train", *given]) == 0
    wanted, everywhere = load_trained(root / again).params, losses(root / again)
    body = yaml.safe_load((root / name / FILE).read_text())
    happened, problems = parsed(body, name, Settings(regions, steps, body["method"], PERIOD, 0))
    assert not problems
    for region in range(regions):
        folder = root / name / f"region{region}"
        assert read_run(folder).end["step"] == steps
        # One that is cut off trains on, and lands what it misses later: it looks at an old anchor.
        out = {step for step, who in happened.left_out.items() if region in who}
        late = {step: range(step - PERIOD + 1, step + 1) for step in everywhere}
        found = {s: x for s, x in losses(folder).items() if out.isdisjoint(late[s])}
        assert found == {step: everywhere[step] for step in found} and {0, steps} <= set(found)
        jax.tree.map(np.testing.assert_array_equal, load_trained(folder).params, wanted)
    return happened


def happened_under(faults, tiny, root, name, steps, exchange, seconds, **config):
    """What happened to three jobs under these faults, each of which came and ended."""
    script = root / f"{name}.yaml"
    write(script, [*far_apart(3, steps), *faults])
    given = [f"--faults={script}", f"--exchange={exchange}"]
    shown = launched(seconds, *arguments(tiny, root, name, 3, steps, *given, **config))
    injected = [fault for fault in faults if fault.kind in ("kill", "stop", "partition", "outage")]
    for fault in injected:
        what = "outage" if fault.kind == "outage" else f"{fault.kind} of region {fault.region}"
        assert f"{what} begins" in shown and f"{what} ends" in shown, shown
    played = read(str(root / name / SCRIPT), 3, steps)
    assert played == read(str(script), 3, steps) and not played[1]
    return assert_as_in_one_process(tiny, root, name, 3, steps, **config)


@pytest.mark.slow
def test_every_kind_of_fault(tiny, root):
    happened = happened_under(EVERY_KIND, tiny, root, "every", 3000, "store", 900)
    # While the folder was away nobody could send, nor just after, before they had seen it back:
    # 9 s, and 2 s, of steps that take 0.02 s at least.
    away = [step for step, who in happened.left_out.items() if len(who) == 3]
    outage = range(2401, 2400 + int(11 / 0.02) + 1)  # some see it begin or end before the others
    assert away and all(step in outage for step in away)
    apart = {step: who for step, who in happened.left_out.items() if step not in outage}
    out = {r: [step for step, who in apart.items() if r in who] for r in range(3)}
    came = {one.region: one.step for one in happened.rejoined}
    # Dead until it was in the run again; and stood still, damaged, or cut off, and not else.
    assert out[1] == list(range(min(out[1]), came[1] + 1, 6)) and came[1] > 300 > min(out[1]) > 60
    assert min(out[2]) >= 900 and len(out[2]) >= 5
    assert set(range(1200, 1230, 6)) <= set(out[0]) and any(step > 1500 for step in out[0])
    assert not [step for who in out.values() for step in who if step < 60]


@pytest.mark.slow
def test_every_kind_of_fault_with_fragments_under_way(tiny, root):
    """Of which one may have landed here and not there."""
    how = {"config": "streaming_diloco"}
    happened = happened_under(EVERY_KIND, tiny, root, "fragments", 3000, "peers", 900, **how)
    assert 1 in {one.region for one in happened.rejoined}
    assert {region for who in happened.left_out.values() for region in who} == {0, 1, 2}


@pytest.mark.slow
def test_an_outage_where_what_has_landed_decides(tiny, root):
    """Of what leaves next, and all must decide alike."""
    faults, how = [Fault(200, "outage", seconds=9.0)], {"config": "cocodc"}
    happened = happened_under(faults, tiny, root, "outage", 900, "peers", 400, **how)
    away = [step for step, who in happened.left_out.items() if len(who) == 3]
    assert len(away) > 10 and min(away) > 200 and max(away) < 800


@pytest.mark.slow
def test_a_death_for_good_and_one_until_after_the_end(tiny, root):
    """The last region ends without them; who was to come back takes its result."""
    script = root / "death.yaml"
    kills = [Fault(60, "kill", 0), Fault(300, "kill", 1, steps=900)]
    write(script, [*far_apart(3, 600), *kills])
    given = arguments(tiny, root, "death", 3, 600, f"--faults={script}")
    shown = launched(200, *given)
    assert "the run is over without region 0" in shown and "kill of region 1 ends" in shown
    body = yaml.safe_load((root / "death" / FILE).read_text())
    happened, _ = parsed(body, "death", Settings(3, 600, "diloco", PERIOD, 0))
    assert happened.at_the_end == {0: (0, 1)} and happened.left_out[600] == (0, 1)
    assert not happened.rejoined
    again = arguments(tiny, root, "after", 3, 600, f"--config.faults={root / 'death' / FILE}")
    assert main(["train", *again, "--quiet"]) == 0
    survivor = load_trained(root / "death/region2").params
    for name in ("after", "death/region1"):
        jax.tree.map(np.testing.assert_array_equal, load_trained(root / name).params, survivor)


@pytest.mark.slow
def test_by_time(tiny, root):
    """A region is stopped and sends damaged payloads by one clock: the launcher's and its own."""
    script = root / "time.yaml"
    everyone = [
        Fault(None, kind, r, time=1, seconds=900, delay=delay)
        for r in range(3)
        for kind, delay in (("late", 0.15), ("straggle", 0.02))
    ]
    corrupt = Fault(None, "corrupt", 1, time=8, seconds=6)
    write(script, [*everyone, corrupt, Fault(None, "stop", 2, time=16, seconds=8)])
    steps = 1500  # region 2 has time to come back
    given = [f"--faults={script}", "--exchange=store"]
    shown = launched(400, *arguments(tiny, root, "time", 3, steps, *given))
    assert "stop of region 2 ends" in shown
    happened = assert_as_in_one_process(tiny, root, "time", 3, steps)
    logs = [read_run(root / "time" / f"region{r}") for r in range(3)]
    began = {log.header["began"] for log in logs}
    assert len(began) == 1
    back = min((one.step for one in happened.rejoined), default=steps)
    when = {step["step"]: step["seconds"] for step in logs[0].steps}
    # Region 0's log counts from a moment before or after the run began, by a second or two.
    for region, begin, end in ((1, 8, 14), (2, 16, 24)):
        missed = [when[step] for step, who in happened.left_out.items() if region in who]
        assert missed and begin - 3 < min(missed), (region, missed)
        # Who stood still may come in anew, which takes a while.
        assert max(missed) < (end + 3 if region == 1 else max(end + 8, when[back] + 15))


FAULTS, STEPS, R = 40, 1600, 4


@pytest.mark.slow
@pytest.mark.parametrize("config", ["diloco", "streaming_diloco"])
def test_forty_faults_over_four_regions(config, tiny, root):
    """Their anchors are those of one process, and as good as without faults.

    More faults at once: `python tests/campaigns.py`.
    """
    name, how = f"many-{config}", {"config": config}
    script = at_random(1, FAULTS, R, STEPS)
    played = [*far_apart(R, STEPS), *script]
    write(root / f"{name}.yaml", played)
    given = [f"--faults={root / name}.yaml", "--exchange=store"]
    began = time.monotonic()
    shown = launched(3600, *arguments(tiny, root, name, R, STEPS, *given, **how))
    took = time.monotonic() - began
    assert read(str(root / name / SCRIPT), R, STEPS) == (played, [])
    assert "never came" not in shown, shown
    for kind in ("kill", "stop", "partition", "outage"):
        of = sum(fault.kind == kind for fault in script)
        assert len(re.findall(rf"{kind}.* begins", shown)) == of, kind
    happened = assert_as_in_one_process(tiny, root, name, R, STEPS, **how)
    killed = sum(fault.kind == "kill" for fault in script)
    free = []
    for seed in range(5):
        seeded = [f"--config.seed={seed}", "--quiet"]
        assert main(["train", *arguments(tiny, root, "free", R, STEPS, *seeded, **how)]) == 0
        free.append(losses(root / "free")[STEPS])
        shutil.rmtree(root / "free")
    found = losses(root / name / "region0")[STEPS]
    # Where one more run without faults would end, with a chance of 99 %.
    mean, spread = np.mean(free), np.std(free, ddof=1)
    half = special.stdtrit(len(free) - 1, 0.995) * spread * np.sqrt(1 + 1 / len(free))
    kinds = collections.Counter(fault.kind for fault in script)
    missed = sum(map(len, happened.left_out.values()))
    print(f"{dict(kinds)}, {took:.0f} s, {len(happened.rejoined)} times a region came back")
    print(f"left out of {missed} sends; loss {found:.4f}, without faults {mean:.4f} +- {half:.4f}")
    assert len(happened.rejoined) >= killed / 2 and missed > 2 * killed
    assert abs(found - mean) < half
