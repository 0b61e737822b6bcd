"""Faults of a run in one process: by step, by the virtual clock, and as they happened to jobs."""

import jax
import numpy as np
import pytest
import yaml

from experiments.__main__ import main
from experiments.faults.fault import Fault, Moment
from experiments.faults.happened import Happened, Rejoin, Settings, parsed
from experiments.faults.simulated import Absences
from experiments.report.runlog import read_run

STEPS = 24
RUN = Settings(3, STEPS, "diloco", 6, 0)
LOSSES = "--config.eval.per_region=True"  # of every region
SCRIPT = """
- {step: 12, kind: stop, region: 0, steps: 6}
- {step: 6, kind: kill, region: 2, steps: 8}
- {step: 15, kind: outage, seconds: 3}
- {step: 20, kind: kill, region: 1}
"""


def command(tiny, root, name, *more):
    arguments = ["train", "--config=diloco", *tiny.arguments(root), "--quiet"]
    arguments += ["--config.regions=3", "--config.method.period=6", f"--config.steps={STEPS}"]
    return [*arguments, f"--workdir={root / name}", *more]


def trained(tiny, root, name, faults, *more):
    (root / f"{name}.yaml").write_text(faults)
    more = [*more, f"--config.faults={root / f'{name}.yaml'}"]
    assert main(command(tiny, root, name, *more)) == 0
    return read_run(root / name)


def sends(run):
    return {
        step["step"]: np.array(event["participants"]).astype(int).tolist()
        for step in run.steps
        for event in step["events"]
        if event["kind"] == "send"
    }


def refused(tiny, root, capsys, faults, *more):
    (root / "refused.yaml").write_text(faults)
    given = [*more, f"--config.faults={root / 'refused.yaml'}"]
    assert main(command(tiny, root, "refused", *given)) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def scripted(tiny, root):
    """The run of `SCRIPT`."""
    with jax.numpy_dtype_promotion("standard"):
        return trained(tiny, root, "script", SCRIPT, "--config.eval.every=7", LOSSES)


def test_who_is_down_takes_no_part_and_comes_back_with_the_anchor(scripted):
    assert sends(scripted) == {6: [1, 1, 0], 12: [0, 1, 0], 18: [1, 1, 1], 24: [1, 0, 1]}
    at = {record["step"]: record for record in scripted.evals}
    # Region 2 is back after step 14, where losses are looked at: they are the anchor's.
    assert at[14]["regions"][2] == at[14]["anchor"] != at[14]["regions"][1]
    assert at[7]["regions"][2] != at[7]["anchor"]


def test_what_happened_is_done_again(scripted, tiny, root):
    """The same absences as the script has, written as those of jobs: the same bits."""
    out = {6: (2,), 12: (0, 2), 24: (1,)}
    done = Happened(RUN, out, {}, {0: (1,)}, (Rejoin(14, 2),))
    done.write(root / "written.yaml")
    assert parsed(yaml.safe_load((root / "written.yaml").read_text()), "", RUN) == (done, [])
    text = (root / "written.yaml").read_text()
    # Looked at elsewhere: what is done between changes nothing.
    again = trained(tiny, root, "again", text, "--config.eval.every=5")
    other = trained(tiny, root, "other", text.replace("0: [1]", "0: [0]"), "--config.eval.every=5")
    assert [s["loss"] for s in scripted.steps] == [s["loss"] for s in again.steps]
    assert scripted.evals[-1]["anchor"] == again.evals[-1]["anchor"]
    assert [e["anchor"] for e in again.evals][:-1] == [e["anchor"] for e in other.evals][:-1]
    assert scripted.evals[-1]["anchor"] != other.evals[-1]["anchor"]


def test_who_was_counted_may_keep_its_own_values(tiny, root):
    """What it sent counts; what it had is measured again against the anchor that has moved."""
    done = Happened(RUN, {6: (0, 1, 2)}, {12: (1,)}, {}, ())
    done.write(root / "written.yaml")
    text = (root / "written.yaml").read_text()
    run = trained(tiny, root, "kept", text, "--config.eval.every=12", LOSSES)
    assert sends(run) == {6: [0, 0, 0], 12: [1, 1, 1], 18: [1, 1, 1], 24: [1, 1, 1]}
    at = {record["step"]: record for record in run.evals}
    assert at[12]["regions"][0] == at[12]["regions"][2] == at[12]["anchor"]
    assert at[12]["regions"][1] != at[12]["anchor"]
    assert at[24]["regions"] == [at[24]["anchor"]] * 3


def test_by_time_on_the_virtual_clock(tiny, root, capsys):
    """Steps take a second each and exchanges next to nothing."""
    (root / "network.yaml").write_text(
        "{regions: 3, bandwidth_gbps: 1000000, delay_ms: 0, compute_s: 1}"
    )
    timed = """
    - {time: 5.5, kind: kill, region: 2, seconds: 7}
    - {time: 16.5, kind: stop, region: 1, seconds: 3}
    """
    assert "go by time" in refused(tiny, root, capsys, timed)
    network = f"--config.network={root / 'network.yaml'}"
    run = trained(tiny, root, "timed", timed, network, "--config.eval.every=13", LOSSES)
    # What is sent after step t is sent by those who are up when it begins, after t - 1 seconds.
    assert sends(run) == {6: [1, 1, 1], 12: [1, 1, 0], 18: [1, 0, 1], 24: [1, 1, 1]}
    back = run.evals[1]
    assert back["step"] == 13 and back["regions"][2] == back["anchor"] != back["regions"][1]


def test_what_cannot_be_replayed_is_refused(tiny, root, capsys):
    nothing = "left_out: {}\nkept_own: {}\nleft_out_at_the_end: {}\nnot_finite: {}\nrejoined: "
    head = f"regions: 3\nsteps: {STEPS}\nmethod: diloco\nperiod: 6\nseed: 0\n{nothing}"
    came = "[{step: 6, region: 1}]"
    kept = "[{step: 6, region: 1, moments_of: 3}]"
    assert "checkpoint of step 3" in refused(tiny, root, capsys, head + kept)
    other = f"regions: 4\nsteps: 9\nmethod: noloco\nperiod: 12\nseed: 1\n{nothing}[]"
    shown = refused(tiny, root, capsys, other)
    for differs in ("regions=4", "steps=9", "method=noloco", "period=12", "seed=1"):
        assert f"is of a run with {differs}: this one has" in shown
    assert "missing required field `steps`" in refused(tiny, root, capsys, "regions: 3")
    strange = head.replace("left_out: {}", "left_out: {6: [0, 3]}") + "[]"
    assert "names regions [3] of 3" in refused(tiny, root, capsys, strange)
    shown = refused(tiny, root, capsys, head + "[{step: 1}]")
    assert "missing required field `region` - at `$.rejoined[0]`" in shown
    noloco = ["--config=noloco", "--config.method.period=6"]
    gossip = head.replace("diloco", "noloco")
    assert "anchor of another" in refused(tiny, root, capsys, gossip + came, *noloco)
    last = gossip.replace("left_out: {}", f"left_out: {{{STEPS}: [1]}}") + "[]"
    assert "do not synchronise once more" in refused(tiny, root, capsys, last, *noloco)
    tokens = head.replace("left_out: {}", "left_out: {6: [1]}") + "[]"
    assert "count tokens" in refused(tiny, root, capsys, tokens, "--config.weights=tokens")
    alone = ["--config.exchange=store", f"--config.rendezvous=file://{root}/meet"]
    assert "is what happened" in refused(tiny, root, capsys, head + "[]", *alone)


def test_a_full_disk_ends_a_job_as_a_kill_does():
    """The region comes back from the anchor; where it was stopped it comes back as it was."""
    faults = [Fault(4, "full_disk", 1, steps=5), Fault(6, "stop", 2, steps=2)]
    absent = Absences(faults, 3)
    assert absent.next_return(0) == 9 and absent.next_return(9) == np.inf
    comes = [absent.returning(Moment(t - 1, None), Moment(t, None)) for t in (8, 9)]
    assert [one.tolist() for one in comes] == [[False] * 3, [False, True, False]]
