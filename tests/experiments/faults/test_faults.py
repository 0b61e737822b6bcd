"""Scripts of faults: read, refused, written, drawn."""

import math

import numpy as np
import pytest

from experiments.faults.fault import ABSENT, KINDS, Fault, participants
from experiments.faults.scripts import at_random, last_begin, read, write

SCRIPT = """
- {step: 12, kind: stop, region: 0, steps: 5}
- {step: 6, kind: kill, region: 2, steps: 12}
- {step: 15, kind: outage, seconds: 3}
- {step: 19, kind: late, region: 1, steps: 9, delay: 2}
- {step: 20, kind: kill, region: 2, steps: 2}
- {step: 20, kind: slow, region: 1, steps: 3, mbit: 2}
- {step: 21, kind: slow, region: 2, steps: 3, mbit: 2}
- {step: 23, kind: kill, region: 0}
"""
TIMED = """
- {time: 2.5, kind: kill, region: 2, seconds: 1.5}
- {time: 1, kind: stop, region: 0, seconds: 0.5}
- {time: 4, kind: outage, seconds: 3}
- {time: 5, kind: slow, region: 1, seconds: 9, mbit: 2}
"""


def test_a_script_in_order_and_who_is_up(tmp_path):
    (tmp_path / "script.yaml").write_text(SCRIPT)
    faults, problems = read(str(tmp_path / "script.yaml"), 3, 24)
    assert not problems and [f.step for f in faults] == [6, 12, 15, 19, 20, 20, 21, 23]
    assert faults[4] == Fault(20, "kill", 2, steps=2) and faults[-1].end == math.inf
    up = participants(faults, 3)
    # Who was killed comes back behind what is sent at the last step that it missed.
    wanted = {5: [1, 1, 1], 6: [1, 1, 0], 12: [0, 1, 0], 16: [0, 1, 0], 17: [1, 1, 0]}
    wanted |= {18: [1, 1, 0], 19: [1, 1, 1], 22: [1, 1, 0], 23: [0, 1, 1], 99: [0, 1, 1]}
    assert {step: up(step).astype(int).tolist() for step in wanted} == wanted


def test_a_script_by_time(tmp_path):
    (tmp_path / "script.yaml").write_text(TIMED)
    faults, problems = read(str(tmp_path / "script.yaml"), 3, 24)
    assert not problems and [f.time for f in faults] == [1, 2.5, 4, 5]
    assert [f.end for f in faults] == [1.5, 4, 7, 14]
    up = participants(faults, 3)
    wanted = {0.9: [1, 1, 1], 1: [0, 1, 1], 1.5: [1, 1, 1], 2.5: [1, 1, 0], 4: [1, 1, 1]}
    assert {at: up(1, at).astype(int).tolist() for at in wanted} == wanted
    assert up(3).all()  # the run has not begun
    assert faults[3].on(1, 5.0) and not faults[3].on(7, 4.9) and not faults[3].on(7, None)


@pytest.mark.parametrize("script", [SCRIPT, TIMED, "[]"])
def test_what_is_written_is_what_is_read(tmp_path, script):
    (tmp_path / "one.yaml").write_text(script)
    faults, _ = read(str(tmp_path / "one.yaml"), 3, 24)
    write(tmp_path / "other.yaml", faults)
    assert read(str(tmp_path / "other.yaml"), 3, 24) == (faults, [])


DOWN = """
- {{step: 1, kind: kill, region: 0, steps: 9}}
- {{step: 2, kind: kill, region: {}, steps: 9}}
- {{step: 3, kind: stop, region: {}, steps: 1}}
"""


@pytest.mark.parametrize(
    "script, part",
    [
        ("random:1", "random:SEED:COUNT"),
        ("random:1:22", "give steps=25, or 21 faults"),
        ("nowhere.yaml", "cannot be read"),
        ("text", "give a list of faults"),
        ("- {kind: kill, region: 1, steps: 1}", "say when it begins"),
        ("- {step: 1, time: 1, kind: kill, region: 1}", "say when it begins"),
        ("- {step: 0, kind: kill, region: 1, steps: 1}", "step=0 must be"),
        ("- {step: 1.5, kind: kill, region: 1, steps: 1}", "step=1.5 must be a whole number"),
        ("- {step: 24, kind: kill, region: 1}", "begin before the last step, 24"),
        ("- {step: 1, kind: explode, region: 1, steps: 1}", "kind='explode'"),
        ("- {step: 1, kind: kill, region: 3, steps: 1}", "region=3 must be one of 0 to 2"),
        ("- {step: 1, kind: stop, region: 1}", "steps=None must be"),
        ("- {step: 1, kind: stop, region: 1, seconds: 1, steps: 1}", "leave out seconds=1"),
        ("- {time: 1, kind: stop, region: 1, steps: 1, seconds: 1}", "leave out steps=1"),
        ("- {time: 1, kind: stop, region: 1, seconds: .inf}", "seconds=inf must be"),
        ("- {step: 1, kind: outage, region: 1, seconds: 1}", "an outage is everybody's"),
        ("- {when: 1}", "give some of ['step', 'time', 'kind', 'region'"),
        ("- {step: 1, kind: outage, steps: 1}", "seconds=None must be"),
        ("- {step: 1, kind: outage, seconds: 1, steps: 1}", "leave out steps=1"),
        ("- {step: 1, kind: late, region: 1, steps: 1}", "delay=None must be"),
        ("- {step: 1, kind: slow, region: 1, steps: 1, mbit: 0}", "mbit=0 must be"),
        ("- {step: 1, kind: slow, region: 1, steps: 1, mbit: 1, delay: 2}", "leave out delay=2"),
        ("- {step: 1, kind: rejoin, region: 1}", "kind='rejoin'"),
        (DOWN.format(1, 1), "region 1 is still down at step 3"),
        (2 * "- {step: 4, kind: kill, region: 1}\n", "region 1 is still down at step 4"),
        (DOWN.format(1, 2), "no region is left at step 3"),
        (
            "[{step: 1, kind: outage, seconds: 1}, {time: 9, kind: outage, seconds: 1}]",
            "all faults a step, or all of them a time",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, script, part):
    path = tmp_path / "script.yaml"
    path.write_text(script)
    plain = script.startswith(("random", "nowhere"))
    _, problems = read(script if plain else str(path), 3, 24)
    assert any(part in problem for problem in problems), problems


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    path = tmp_path / "script.yaml"
    path.write_text("[{step: 0, kind: stop, region: 7, mbit: 1}, {kind: kill}, 3]")
    _, problems = read(str(path), 3, 24)
    assert len(problems) == 6, problems


@pytest.mark.parametrize("count, regions, steps", [(200, 4, 223), (200, 4, 9000), (40, 2, 600)])
def test_random_ones_are_seeded_overlap_and_leave_somebody(count, regions, steps, tmp_path):
    drawn = at_random(7, count, regions, steps)
    assert drawn == at_random(7, count, regions, steps) != at_random(8, count, regions, steps)
    assert len(drawn) == count and max(f.step for f in drawn) <= last_begin(steps) < steps
    assert len({f.step for f in drawn}) == count
    write(tmp_path / "drawn.yaml", drawn)
    # The checks of a script of one's own: nobody down twice, somebody left, all within the run.
    assert read(str(tmp_path / "drawn.yaml"), regions, steps) == (drawn, [])
    if count == 200:
        assert {f.kind for f in drawn} == {*KINDS}
    if steps > 1000:
        at = [sum(f.kind in ABSENT and f.on(t, None) for f in drawn) for t in range(steps)]
        assert max(at) > 1 and np.mean(at) < regions / 2
