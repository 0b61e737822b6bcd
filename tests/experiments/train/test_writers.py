"""Numbers for Prometheus while a run trains."""

import socket
import urllib.request
from types import SimpleNamespace

import pytest

from experiments.cli import RefusedError
from experiments.train.writers import open_log


@pytest.fixture
def job(tmp_path):
    """A job that is region 1 of a run, and the port its numbers must be on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = {"tensorboard": False, "wandb": None, "prometheus": port - 1}
    return SimpleNamespace(workdir=tmp_path, config={"log": log, "region": 1}), port


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
