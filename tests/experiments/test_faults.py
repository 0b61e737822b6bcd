"""Scripts of faults: read, refused, drawn, and what they do on a mesh."""

import itertools

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.faults import KINDS, Fault, at_random, participants, read
from experiments.runlog import read_run

SCRIPT = """
- {step: 12, kind: stop, region: 0, steps: 6}
- {step: 6, kind: kill, region: 2, steps: 12}
- {step: 15, kind: outage, seconds: 3}
- {step: 19, kind: late, region: 1, steps: 9, seconds: 2}
"""


def test_a_script_in_order_and_who_is_up(tmp_path):
    (tmp_path / "script.yaml").write_text(SCRIPT)
    faults, problems = read(str(tmp_path / "script.yaml"), 3, 24)
    assert not problems and [f.step for f in faults] == [6, 12, 15, 19]
    up = participants(faults, 3)
    wanted = {5: [1, 1, 1], 6: [1, 1, 0], 12: [0, 1, 0], 17: [0, 1, 0], 18: [1, 1, 1]}
    assert {step: up(step).astype(int).tolist() for step in wanted} == wanted


DOWN = """
- {{step: 1, kind: kill, region: 0, steps: 9}}
- {{step: 2, kind: kill, region: {}, steps: 9}}
- {{step: 3, kind: stop, region: {}, steps: 1}}
"""


@pytest.mark.parametrize(
    "script, part",
    [
        ("random:1", "random:SEED:COUNT"),
        ("nowhere.yaml", "cannot be read"),
        ("text", "give a list of faults"),
        ("- {step: 0, kind: kill, region: 1, steps: 1}", "step=0 must be"),
        ("- {step: 1, kind: explode, region: 1, steps: 1}", "kind='explode'"),
        ("- {step: 1, kind: kill, region: 3, steps: 1}", "region=3 must be one of 0 to 2"),
        ("- {step: 1, kind: outage, region: 1, seconds: 1}", "an outage is everybody's"),
        ("- {when: 1}", "give ['kind', 'mbit', 'region'"),
        ("- {step: 1, kind: outage, steps: 1}", "seconds=None must be"),
        ("- {step: 1, kind: outage, seconds: 1, steps: 1}", "leave out steps=1"),
        ("- {step: 1, kind: late, region: 1, steps: 1}", "seconds=None must be"),
        ("- {step: 1, kind: slow, region: 1, steps: 1, mbit: 0}", "mbit=0 must be"),
        (
            "- {step: 1, kind: slow, region: 1, steps: 1, mbit: 1, seconds: 2}",
            "leave out seconds=2",
        ),
        (DOWN.format(1, 1), "region 1 is still down at step 3"),
        (DOWN.format(1, 2), "no region is left at step 3"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, script, part):
    path = tmp_path / "script.yaml"
    path.write_text(script)
    plain = script.startswith(("random", "nowhere"))
    _, problems = read(script if plain else str(path), 3, 24)
    assert any(part in problem for problem in problems), problems


def test_random_ones_are_seeded_and_never_overlap():
    faults = at_random(7, 20, 4, 600)
    assert faults == at_random(7, 20, 4, 600) != at_random(8, 20, 4, 600)
    assert len(faults) == 20 and faults[-1].end <= 600
    assert all(a.end <= b.step for a, b in itertools.pairwise(faults))
    assert {f.kind for f in at_random(0, 100, 4, 600)} == set(KINDS)
    assert isinstance(faults[0], Fault)


def test_on_a_mesh_a_region_that_is_down_takes_no_part(tiny, tmp_path):
    tiny.corpus(tmp_path / "texts")
    (tmp_path / "script.yaml").write_text(SCRIPT)
    arguments = ["train", "--config=diloco", *tiny.arguments(tmp_path), "--quiet"]
    arguments += ["--config.regions=3", "--config.method.period=6", "--config.steps=24"]
    workdir = tmp_path / "run"
    arguments += [f"--config.faults={tmp_path / 'script.yaml'}", f"--workdir={workdir}"]
    assert main(arguments) == 0
    sends = {
        step["step"]: np.array(event["participants"]).astype(int).tolist()
        for step in read_run(workdir).steps
        for event in step["events"]
        if event["kind"] == "send"
    }
    assert sends == {6: [1, 1, 0], 12: [0, 1, 0], 18: [1, 1, 1], 24: [1, 1, 1]}
