"""AdLoCo from the command line: interrupted and whole, its metrics, its report."""

import os
import signal

import numpy as np
import pytest
from launched import comparable

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.report.html_data import exchanges_at
from experiments.report.main import table
from experiments.report.runlog import nominal_steps, read_run, summarise
from experiments.report.virtual import Links, check, on_network
from experiments.train.drivers import AdaptiveDriver
from experiments.train.loop import TrainingLoop
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

STEPS, PERIOD, REGIONS, BATCH, LENGTH = 24, 4, 3, 2, 32
NETWORK = "aws:Oregon,Virginia,Tokyo"


def command(tiny, root, workdir):
    return [
        "train",
        *tiny.arguments(
            root,
            "--config=adloco",
            f"--config.steps={STEPS}",
            f"--config.method.period={PERIOD}",
            "--config.method.trainers=3",
            "--config.method.merge_every=1",
            "--config.method.inner_batching.cap=5",
            "--config.adaptive.largest_microbatch=1",
            "--config.adaptive.scaling=sqrt",
            f"--config.network={NETWORK}",
            "--config.log.every=5",
            "--config.eval.every=10",
            "--config.checkpoint.every=0",
            f"--workdir={root / workdir}",
            "--quiet",
        ),
    ]


def test_adloco(tmp_path, tiny):
    """One test, so that the three runs are made once: whole, interrupted in a round, continued."""
    folder = tmp_path
    tiny.corpus(folder / "texts")
    assert main(command(tiny, folder, "whole")) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_chunk", interrupted_after(3))
        # However slow the machine is, the signal is looked at after a whole chunk.
        patch.setattr(AdaptiveDriver, "_piece", lambda self: STEPS)
        assert main(command(tiny, folder, "broken")) == EXIT_INTERRUPTED
    assert main(command(tiny, folder, "broken")) == 0
    check_that_interrupted_equals_whole(folder)
    check_what_the_trainers_did(folder)
    check_evaluations_go_by_tokens(folder)
    check_report_and_replay(folder)


def interrupted_after(count):
    """`TrainingLoop._chunk` that is hit by a signal in its last call."""
    made, chunk = [], TrainingLoop._chunk

    def counted(self):
        made.append(self)
        if len(made) == count:
            os.kill(os.getpid(), signal.SIGTERM)
        chunk(self)

    return counted


def schedule(done, warmup=2, last=0.1):
    """Share of the peak after so many nominal steps: a cosine, times a linear warm-up."""
    gone = max(0.0, done - warmup) / (STEPS - warmup)
    share = last + (1 - last) * (1 + np.cos(np.pi * gone)) / 2
    return share * min(1.0, (done + 1) / warmup)


def of(kind, records):
    return [r for r in records if r["kind"] == kind]


def samples_of(row):
    return sum(trainer["samples"] for trainer in row["trainers"].values())


def check_that_interrupted_equals_whole(root):
    [resumed] = of("resume", read_records(root / "broken" / "metrics.jsonl"))
    assert resumed["step"] % PERIOD != 0  # in the middle of a round
    broken, whole = (comparable(root / name) for name in ("broken", "whole"))
    assert broken[1:] == whole[1:]


def check_what_the_trainers_did(root):
    rows = of("step", read_records(root / "whole" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    live = [len(row["trainers"]) for row in rows]
    assert live[0] == 3 and live[-1] == 1 and live == sorted(live, reverse=True)
    used = 0
    for row in rows:
        # The schedule stands where the samples before this step have brought it.
        trainers = row["trainers"].values()
        for trainer in trainers:
            share = trainer["rate"] / np.sqrt(trainer["samples"] / REGIONS / BATCH)
            assert share == pytest.approx(schedule(used / (REGIONS * BATCH)), rel=1e-4)
        used += samples_of(row)
        assert row["lr"] == pytest.approx(2e-3 * np.mean([t["rate"] for t in trainers]))
    nominal = STEPS * REGIONS * BATCH
    assert nominal <= used < nominal + samples_of(rows[-1])
    merges = [merge for row in rows for merge in row.get("merges", [])]
    assert len(merges) == 2 and all(m["batches"][0] >= m["batches"][1] for m in merges)
    looks = [row["step"] for row in rows if "looks" in row]
    assert looks == [step for step in range(1, len(rows) + 1) if step % PERIOD == 0]


def check_evaluations_go_by_tokens(root):
    records = read_records(root / "whole" / "metrics.jsonl")
    run = read_run(root / "whole")
    evaluated = [nominal_steps(run, record) for record in run.evals]
    assert len(evaluated) == 4  # the start, after 10 and 20 nominal steps, the end
    step = max(map(samples_of, of("step", records))) / (REGIONS * BATCH)
    for found, due in zip(evaluated, (0, 10, 20, STEPS)):
        assert 0.95 * due <= found <= due + step


def check_report_and_replay(root):
    run = read_run(root / "whole")
    summary = summarise(run)
    assert summary.trainers == (3, 1) and summary.merges == 2
    assert summary.batch[0] == 1 and summary.batch[1] > 1
    assert summary.exchanges == sum(row["step"] % PERIOD == 0 for row in run.steps)
    sent = [row["step"] for row in run.steps if row["step"] % PERIOD == 0]
    assert exchanges_at(run) == [sum(s <= e["step"] for s in sent) for e in run.evals]
    shown = dict(zip(*(column.cells for column in table([summary]).columns)))
    assert (shown["trainers"], shown["merges"]) == ("3 to 1", "2")
    # Bytes of AllReduce are those of as many nominal steps.
    expected = run.header["allreduce_bytes_per_step"] * nominal_steps(run, run.end)
    assert summary.compression == pytest.approx(expected / summary.bytes_sent)
    network = check([run], NETWORK, None).network
    replayed = on_network(run, Links(network, float(np.median(network.compute_R))))
    own = run.end["virtual"]["wall_s"]
    assert replayed.clock.wall_s == pytest.approx(own, rel=0.02)  # but for the last exchange
