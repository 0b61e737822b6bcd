"""Numbers for Prometheus while a run trains, and the regions that numbers are of."""

import csv
import socket
import urllib.request
from types import SimpleNamespace

import pytest

from experiments.cli import RefusedError
from experiments.metrics import VERSION, MetricsLog
from experiments.report.export_table import write_csv
from experiments.runlog import read_run
from experiments.train.writers import _scalars, open_log


@pytest.fixture
def job(tmp_path):
    """A job that is region 1 of a run, and the port its numbers must be on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = {"tensorboard": False, "wandb": None, "prometheus": port - 1}
    return SimpleNamespace(workdir=tmp_path, config={"log": log, "region": 1}, here=[1]), port


def test_the_newest_numbers_are_there_while_the_log_is_open(job):
    job, port = job
    log = open_log(job, -1)
    record = {"kind": "step", "tokens": 64, "loss": [2.5], "events": []}
    log.write([{**record, "step": 1}, {**record, "step": 2, "loss": [2.25]}])
    log.write([{"kind": "eval", "step": 2, "tokens": 64, "anchor": 2.125}])
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    for line in (
        'lowcomm_step_number{region=""} 2.0',
        'lowcomm_step_loss{region="1"} 2.25',
        'lowcomm_eval_anchor{region=""} 2.125',
    ):
        assert line in page, page
    log.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_a_port_that_is_taken_ends_the_run_before_it_begins(job):
    job, port = job
    with socket.create_server(("0.0.0.0", port)), pytest.raises(RefusedError, match=f"port {port}"):
        open_log(job, -1)


def own_log(folder, region, steps=(1, 2)):
    """The log of one job of four; returns its records."""
    header = {"kind": "header", "version": VERSION, "method": "diloco", "here": [region]}
    header |= {"config": {}, "data": {}, "steps": 2, "regions": 4}
    header |= {"params": 8, "tokens_per_step": 40, "allreduce_bytes_per_step": 48}
    records = [
        {
            "kind": "step",
            "step": step,
            "tokens": 10 * step,
            "loss": [region + step / 10],
            "bytes_sent": [100],
            "bytes_received": [100],
            "seconds": 1.0,
            "tokens_per_second": 10.0,
            "participation": None,
            "events": [],
        }
        for step in steps
    ]
    folder.mkdir()
    log = MetricsLog(folder / "metrics.jsonl", -1)
    log.write([header, *records])
    log.close()
    return records


def losses(folder, table):
    write_csv({"run": read_run(folder)}, table)
    with table.open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "loss"]
    return {(row["step"], row["region"]): row["value"] for row in rows}


def test_of_one_job_of_several_numbers_bear_its_region(tmp_path):
    records = own_log(tmp_path / "region3", 3)
    table = tmp_path / "numbers.csv"
    assert losses(tmp_path / "region3", table) == {("1", "3"): "3.1", ("2", "3"): "3.2"}
    assert _scalars(records[0], [3])["step/loss/region3"] == 3.1
    # Merged logs have a row for every region, and those that are missing have no number.
    own_log(tmp_path / "region1", 1)
    found = losses(tmp_path, table)
    assert {region for _, region in found} == {"0", "1", "2", "3"}
    assert (found["2", "1"], found["2", "3"], found["2", "2"]) == ("1.2", "3.2", "nan")
