"""Numbers for Prometheus while a run trains, and the regions that numbers are of."""

import csv
import socket
import sys
import urllib.request
from types import SimpleNamespace

import made_runs
import pytest
from made_runs import logged

from experiments.cli import RefusedError
from experiments.report.export_table import write_csv
from experiments.report.runlog import read_run
from experiments.train.writers import _scalars, open_log
from experiments.workdir import METRICS


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


def own_log(folder, region):
    """The log of one job of four; returns its records."""
    records = [made_runs.step(step, 1, loss=[region + step / 10]) for step in (1, 2)]
    logged(folder / METRICS, made_runs.header(4, [region], steps=2), *records)
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


class Service:
    """Stands in for the package `wandb`: runs by their id, each of which takes every step once."""

    def __init__(self):
        self.runs = {}

    def init(self, *, id, **settings):
        assert settings["resume"] == "allow"
        return Received(self.runs.setdefault(id, {}))


class Received:
    """A run as a program has it."""

    def __init__(self, rows):
        self._rows, self.step = rows, max(rows, default=-1) + 1

    def log(self, row, step):
        assert step >= self.step - 1, "the real one warns of each, and drops it"
        self.step = step + 1
        self._rows.setdefault(step, {}).update(row)

    def define_metric(self, name, *, step_metric):
        assert (name, step_metric) == ("eval/*", "eval/step")

    def finish(self):
        pass


@pytest.fixture
def service(monkeypatch):
    made = Service()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def of_service(folder):
    folder.mkdir(exist_ok=True)
    log = {"tensorboard": False, "wandb": "project", "prometheus": None}
    return SimpleNamespace(workdir=folder, config={"log": log}, here=[0])


def step(number):
    return {"kind": "step", "step": number, "tokens": 64, "loss": [float(number)], "events": []}


def test_a_new_run_in_an_old_place_is_no_continuation(service, tmp_path):
    """The id belongs to the folder, wherever it is; not to its path."""
    for _ in range(2):
        log = open_log(of_service(tmp_path / "run"), -1)
        log.write([step(1), step(2)])
        log.close()
        (tmp_path / "run" / "metrics.jsonl").unlink()
        (tmp_path / "run").rename(tmp_path / f"moved{len(service.runs)}")
    assert [[*run] for run in service.runs.values()] == [[1, 2], [1, 2]]
    open_log(of_service(tmp_path / "moved1"), -1).close()
    assert len(service.runs) == 2


def test_steps_that_a_kill_took_from_the_service_are_sent_again(service, tmp_path):
    job = of_service(tmp_path / "run")
    log = open_log(job, -1)
    log.write([step(number) for number in range(1, 5)])
    log.write([{"kind": "eval", "step": 4, "tokens": 64, "anchor": 2.5}, step(5), step(6)])
    (rows,) = service.runs.values()
    for lost in (3, 4, 5, 6):
        del rows[lost]
    log = open_log(job, 4)  # the run goes on after its checkpoint
    log.write([step(5)])
    assert {number: row["step/loss/region0"] for number, row in rows.items()} == {
        number: float(number) for number in range(1, 6)
    }
    assert rows[4]["eval/anchor"] == 2.5
    log = open_log(job, 3)
    log.write([step(4), step(5), step(6)])  # which the service has, but for the last
    assert [*rows] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_that_a_restart_owes_reaches_the_service(service, tmp_path):
    """A signal came between the last step and its evaluation."""
    job = of_service(tmp_path / "run")
    open_log(job, -1).write([step(1), step(2)])
    log = open_log(job, 2)
    log.write([{"kind": "eval", "step": 2, "tokens": 64, "anchor": 2.5}])
    (rows,) = service.runs.values()
    assert (rows[3]["eval/anchor"], rows[3]["eval/step"]) == (2.5, 2)
    log.write([step(3)])
    assert rows[3]["step/loss/region0"] == 3.0


def test_what_a_checkpoint_has_is_on_disk_for_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    job = of_service(tmp_path)
    job.config["log"] |= {"tensorboard": True, "wandb": None}
    log = open_log(job, -1)
    (file,) = (tmp_path / "tensorboard").iterdir()
    before = file.stat().st_size
    log.write([step(1)])
    log.sync()
    assert file.stat().st_size > before
    log.close()
