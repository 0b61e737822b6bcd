"""Logs of the jobs of one run, put together by hand-made examples."""

import io
import math
from types import SimpleNamespace

import made_runs
import numpy as np
import pytest
from made_runs import logged
from rich.console import Console

from experiments.__main__ import main as command
from experiments.report.html_data import bytes_at
from experiments.report.main import by_region, region_table
from experiments.report.merged import measure, merged
from experiments.report.runlog import mean_sent, read_run, summarise
from experiments.workdir import METRICS

REGIONS, STEPS = 3, 4


def header(region, **more):
    """Of one region's log."""
    return made_runs.header(REGIONS, [region], **{"steps": STEPS, "params": 5, **more})


def record(region, step, *, waited=0.5, late=()):
    """A step of one region that sends and lands at every second step; late: what it put off."""
    own = {"step": step, "fragment": 0, "key": f"0@{step}", "participants": [True]}
    land = {"kind": "land", **own, "travel_seconds": [2 * waited], "waited_seconds": [waited]}
    land["pull_norm"] = [float(region)]  # of gossip, whose regions differ
    sent = {"bytes_sent": [100 * step], "bytes_received": [200 * step]}
    events = [*late, land] if step % 2 == 0 else []
    return made_runs.step(step, 1, loss=[region + step / 10], events=events, **sent)


def exchanged(region, step, counted=True, left_out=0.0):
    """A step of one region in which a payload of its own leaves and lands."""
    own = {"step": step, "fragment": 0, "key": f"0@{step}"}
    sent = {"kind": "send", **own, "participants": [True], "staleness": [-1]}
    landed = {"kind": "land", **own, "participants": [counted], "staleness": [0]}
    landed |= {"travel_seconds": [0.1], "waited_seconds": [0.0]}
    events = [{**sent, "left_out": [left_out]}, landed]
    return record(region, step) | {"participation": 1.0, "events": events}


def evaluation(step, anchor, **more):
    return {"kind": "eval", "step": step, "tokens": 10 * step, "anchor": anchor, **more}


def test_evaluations_are_at_the_tokens_of_all_regions(tmp_path):
    paths = [
        logged(
            tmp_path / f"{r}.jsonl",
            *(header(r), evaluation(0, None), record(r, 1), record(r, 2), evaluation(2, 1.0)),
        )
        for r in range(REGIONS)
    ]
    at = {r["step"]: r["tokens"] for r in merged(paths) if r["kind"] == "eval"}
    assert at == {0: 0, 2: 60}


def test_evaluations_are_those_of_one_set(tmp_path):
    """Losses of two sets do not compare: of the set that was the last one of the first region."""
    one, other = ({"kind": "eval_set", "document": [0], "count": [n]} for n in (5, 7))
    later = (other, evaluation(2, 2.0), other)
    paths = [
        logged(tmp_path / f"{r}.jsonl", header(r), one, evaluation(1, 3.0), *later)
        for r in range(REGIONS)
    ]
    records = merged(paths)
    assert [r["count"] for r in records if r["kind"] == "eval_set"] == [[7]]
    assert [r["step"] for r in records if r["kind"] == "eval"] == [2]


def losses(folder, records):
    """The merged evaluations of regions, each with these fields."""
    paths = [
        logged(folder / f"{r}.jsonl", header(r), evaluation(3, **one))
        for r, one in enumerate(records)
    ]
    return [record["anchor"] for record in merged(paths) if record["kind"] == "eval"]


def test_losses_are_those_of_a_region_that_was_not_behind(tmp_path):
    behind = {"anchor": 3.0, "behind": 7}
    assert losses(tmp_path, [behind, {"anchor": 2.0}, {"anchor": 1.0}]) == [2.0]
    assert losses(tmp_path / "all", [behind, {**behind, "anchor": 4.0, "behind": 6}]) == [4.0]


def run(folder, ends, late=None):
    """Merged records of regions that end after so many steps each; region `late` puts off a send
    and a landing of step 2 until step 4."""
    paths = []
    for region, last in enumerate(ends):
        records = [record(region, step) for step in range(1, last + 1)]
        if region == late:
            (land,), records[1]["events"] = records[1]["events"], []
            land = {**land, "participants": [False]}
            records[3] = record(region, 4, late=[{**land, "kind": "send"}, land])
        paths.append(logged(folder / f"{region}.jsonl", header(region), *records))
    return merged(paths)


def test_a_lost_region_leaves_its_place_empty_and_keeps_what_it_had(tmp_path):
    header, *records = run(tmp_path, [4, 2, 4])
    assert header["here"] == [0, 1, 2]
    steps = {r["step"]: r for r in records if r["kind"] == "step"}
    assert steps[2]["loss"] == [0.2, 1.2, 2.2] and steps[2]["tokens"] == 60
    assert steps[4]["loss"][::2] == [0.4, 2.4] and math.isnan(steps[4]["loss"][1])
    assert steps[4]["tokens"] == 40 + 20 + 40 and steps[4]["bytes_sent"] == [400, 200, 400]
    [event] = steps[4]["events"]
    assert event["participants"] == [True, False, True]
    assert event["pull_norm"][::2] == [0.0, 2.0] and math.isnan(event["pull_norm"][1])
    assert event["waited_seconds"][::2] == [0.5, 0.5] and math.isnan(event["waited_seconds"][1])


def test_growing_batches_count_for_all_regions_where_a_log_is_missing(tmp_path):
    """Each of two logs holds half of its region's tokens: half of the run, not a third."""
    for region in range(REGIONS - 1):
        steps = [record(region, step) | {"trainers": {}} for step in (1, STEPS // 2)]
        logged(tmp_path / f"region{region}" / METRICS, header(region), *steps)
    *here, missing = by_region(read_run(tmp_path))
    assert [region.progress for region in here] == [0.5, 0.5] and math.isnan(missing.progress)


@pytest.mark.parametrize("counted, share", [(3, 0.21), (7, 0.5), (14, 1.0)])
def test_a_region_that_sent_and_was_not_counted_did_not_take_part(tmp_path, counted, share):
    """Region 1 sends at every step, thinks that it took part, and is counted in the first ones."""
    for region in range(REGIONS):
        made = [exchanged(region, t, region != 1 or t <= counted) for t in range(1, 15)]
        logged(tmp_path / f"region{region}" / METRICS, header(region, steps=14), *made)
    whole = read_run(tmp_path)
    assert [r.participation for r in by_region(whole)] == [1, pytest.approx(share, abs=0.01), 1]
    assert [r.liveness for r in by_region(whole)] == [r.progress for r in by_region(whole)]
    assert [r.liveness for r in by_region(whole)] == [1, 1, 1]
    assert summarise(whole).participation == pytest.approx((2 + counted / 14) / 3)
    alone = read_run(tmp_path / "region1")
    assert summarise(alone).participation == pytest.approx(counted / 14)


def test_a_payload_that_the_guard_left_out_does_not_count(tmp_path):
    """All commit records name region 1, whose payload was not finite at every second step."""
    for region in range(REGIONS):
        lost = region == 1
        made = [exchanged(region, t, left_out=float(lost and t % 2)) for t in range(1, STEPS + 1)]
        logged(tmp_path / f"region{region}" / METRICS, header(region), *made)
    whole, console = read_run(tmp_path), Console(file=io.StringIO(), width=100)
    console.print(region_table(whole, by_region(whole)))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    shares = {row[0]: row[1] for row in rows if len(row) > 5}
    assert [shares[str(region)] for region in range(REGIONS)] == ["100%", "50%", "100%"]
    assert summarise(whole).participation == pytest.approx(5 / 6)


def test_skipped_steps_of_a_region_that_was_away_are_those_it_made(tmp_path):
    for region, last in enumerate([4, 2, 4]):
        changes = {"skipped": [1.0], "events": []}
        made = [record(region, step) | changes for step in range(1, last + 1)]
        logged(tmp_path / f"region{region}" / METRICS, header(region), *made)
    assert summarise(read_run(tmp_path)).skipped == 4 + 2 + 4


def test_what_was_put_off_stands_where_the_others_have_it(tmp_path):
    _, *records = run(tmp_path, [4, 4, 4], late=1)
    steps = {r["step"]: r for r in records if r["kind"] == "step"}
    land, send = steps[2]["events"]
    assert (send["kind"], land["kind"]) == ("send", "land")
    assert land["participants"] == [True, False, True]
    assert [event["step"] for event in steps[4]["events"]] == [4]
    assert steps[2]["participation"] == 0.0 and steps[4]["participation"] is None


def test_three_numbers_and_the_waiting_of_every_region(tmp_path):
    header, *records = run(tmp_path, [4, 2, 3])
    steps = [r for r in records if r["kind"] == "step"]
    found = by_region(SimpleNamespace(header=header, steps=steps))
    assert [r.participation for r in found] == [1, 0.5, 0.5]
    assert [r.liveness for r in found] == [1, 0.5, 0.75]
    assert [r.progress for r in found] == [1, 0.5, 0.75]
    assert [r.waited_s for r in found] == [1, 0.5, 0.5] and found[0].travel_s == 1


def test_where_no_region_is_a_job_of_several_there_is_no_table_of_them():
    """A run of one process; a run of one region, or the log of one of several."""
    one_process = {"kind": "land", "participants": [True]}
    one_job = {"participants": [True], "travel_seconds": [0.1], "waited_seconds": [0.0]}
    for event in (one_process, one_job):
        steps = [{"step": 1, "loss": [1.0, 2.0], "events": [event]}]
        assert by_region(SimpleNamespace(header={"steps": 1}, steps=steps)) == []


def test_the_end_of_a_run_without_the_log_of_one_region(tmp_path):
    paths = []
    for region in (0, 2):
        last = {**record(region, 2 + region), "kind": "end"}
        made = (header(region, steps=2), record(region, 1), record(region, 2), last)
        paths.append(logged(tmp_path / f"{region}.jsonl", *made))
    end = merged(paths)[-1]
    assert end["kind"] == "end" and end["tokens"] == 20 + 40
    assert end["bytes_sent"][::2] == [200, 400] and math.isnan(end["bytes_sent"][1])
    assert end["seconds"] == 4


def written(folder, regions, last=14, end=True):
    """Logs of a run of three regions that all take part in all, of `regions` alone."""
    for region in regions:
        made = [exchanged(region, t) for t in range(1, last + 1)]
        if end:
            made.append({**record(region, last), "kind": "end", "bytes_sent": [100 * last + 7]})
        about = header(region, steps=last, allreduce_bytes_per_step=300)
        logged(folder / f"region{region}" / METRICS, about, *made)
    return folder


def test_a_region_whose_log_is_missing_is_no_zero(tmp_path, capsys):
    whole = summarise(read_run(written(tmp_path / "whole", (0, 1, 2))))
    run = read_run(written(tmp_path / "run", (0, 2)))
    assert run.missing == (1,)
    found = summarise(run)
    assert whole.complete and not found.complete
    assert found.bytes_sent == whole.bytes_sent == 1407
    assert found.compression == whole.compression
    assert found.participation == whole.participation == 1.0
    assert (whole.tokens, found.tokens) == (420, 280)
    assert bytes_at(run) == [] and mean_sent(run.steps[-1]) == 1400
    page = tmp_path / "page.html"
    assert command(["report", str(tmp_path / "run"), f"--html={page}"]) == 0
    said = capsys.readouterr().out
    line = "logs of regions [1] are missing: totals are of the others"
    assert f"run: {line}" in said and line in page.read_text()
    assert "run (at step 14)" in " ".join(said.split()) and "nan" not in said
    rows = {row[0]: row[1:] for row in map(str.split, said.splitlines()) if row}
    assert rows["0"] == rows["2"] == ["100%", "100%", "100%", "0.0", "s", "100", "ms"]
    assert rows["1"] == ["-"] * 5
    assert command(["report", str(tmp_path / "whole")]) == 0
    assert "missing" not in capsys.readouterr().out


def test_where_one_log_is_left_the_others_are_named(tmp_path):
    run = read_run(written(tmp_path, (2,), end=False))
    assert run.missing == (0, 1) and summarise(run).bytes_sent == 1400
    alone = read_run(tmp_path / "region2")
    assert alone.missing == (), "the log of one job is what was asked for"


def test_a_region_that_saw_no_exchange_has_no_time_of_one(tmp_path):
    run = read_run(written(tmp_path, (0, 1, 2)))
    for step in run.steps:
        for event in step["events"]:
            if event["kind"] == "land":
                event["travel_seconds"][1] = math.nan
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(region_table(run, by_region(run)))
    assert "nan" not in console.export_text()


def test_participation_is_of_all_regions_also_of_those_that_were_away(tmp_path):
    """Region 0 makes four steps, region 1 two, region 2 none; all who are there take part."""
    paths = []
    for region, last in enumerate((4, 2, 0)):
        made = [record(region, t) | {"participation": 1.0} for t in range(1, last + 1)]
        paths.append(logged(tmp_path / f"{region}.jsonl", header(region), *made))
    steps = [r for r in merged(paths) if r["kind"] == "step"]
    expected = [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    assert [r["participation"] for r in steps] == expected


def test_a_loss_that_is_not_finite_is_shown_and_is_not_in_the_mean(tmp_path):
    """A log has null in its place; region 1 had one at both steps, region 0 at the second."""
    paths, losses = [], [[2.0, None], [None, None]]
    for region, own in enumerate(losses):
        made = (record(region, t) | {"loss": [x]} for t, x in enumerate(own, 1))
        paths.append(logged(tmp_path / f"{region}.jsonl", header(region), *made))
    first, second = (r for r in merged(paths) if r["kind"] == "step")
    assert first["loss"][0] == first["loss_mean"] == 2.0 and np.isnan(first["loss"][1:]).all()
    assert np.isnan(second["loss"]).all() and np.isnan(second["loss_mean"])


def test_the_log_of_one_learner_names_all_that_a_round_admitted():
    """Its own list has one entry; two of three were admitted."""
    send = {"kind": "send", "fragment": 0, "key": "a", "round": 4, "participants": [True]}
    land = {**send, "kind": "land", "travel_seconds": [0.1], "admitted": [True, False, True]}
    step = {"step": 8, "participation": 1.0, "events": [{**send, "left_out": [0.0]}, land]}
    measure([step])
    assert step["participation"] == pytest.approx(2 / 3)
