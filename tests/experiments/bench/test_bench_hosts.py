"""`bench hosts`: its commands, its table, and what it refuses."""

import pytest

from experiments.bench import hosts, main
from experiments.cli import RefusedError
from experiments.metrics import MetricsLog


def test_the_same_run_in_three_ways(tmp_path):
    given = ["--config=diloco", "--config.regions=2"]
    (one,) = hosts.commands_of(hosts.ONE, given, tmp_path)
    several = hosts.commands_of(hosts.SEVERAL, given, tmp_path)
    (jobs,) = hosts.commands_of(hosts.JOBS, given, tmp_path)
    assert len(several) == 2 and all(set(one) < set(command) for command in several)
    assert {"--process=0", "--process=1"} <= {a for command in several for a in command}
    assert jobs[0] == "launch" and "--regions=2" in jobs


def test_pace_leaves_out_what_compiles(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", -1)
    log.write(
        [{"kind": "step", "step": i, "tokens": 100 * i, "seconds": 50.0 + i} for i in range(1, 9)]
    )
    log.close()
    assert hosts.pace(tmp_path, 2) == pytest.approx(100)


def test_ratios_are_taken_within_a_round():
    made = hosts.table({hosts.ONE: [100.0, 50.0], hosts.SEVERAL: [90.0, 50.0], hosts.JOBS: [1, 1]})
    assert list(made.columns[2].cells)[1] == "0.95"


@pytest.mark.parametrize("flag", ["--steps=10", "--batch=0", "--repeats=0"])
def test_refused(flag):
    with pytest.raises(RefusedError, match="is needed"):
        main.main(["hosts", flag])
