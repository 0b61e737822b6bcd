"""Of a run of several jobs: what is refused of several processes a region, and what is kept."""

from types import SimpleNamespace

import pytest

import lowcomm_jax as lc
from experiments.cli import RefusedError
from experiments.config import base, plain
from experiments.refusals import PROCESSES, Asked, run_problems
from experiments.train import assemble, devices
from experiments.train.assemble import open_exchange
from experiments.train.processes import refuse


def problems(**changes):
    fields = plain(base("diloco", period=5))
    mesh = fields["mesh"] | changes.get("mesh", {})
    fields |= {"exchange": "store", **changes, "mesh": mesh}
    return run_problems(Asked(fields), PROCESSES)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"processes": 2, "process": 1, "coordinator": "host:8476"},
        {"processes": 2, "process": 1, "coordinator": "[::1]:8476"},
        {"processes": 0},
        {"processes": 4, "mesh": {"fsdp": 8}},
        {"processes": 4, "exchange": "mesh", "mesh": {"region": 2}},
        {"exchange": "mesh", "process": 1, "coordinator": "host:8476"},
    ],
)
def test_accepted(changes):
    assert problems(**changes) == []


def test_devices_of_one_process_of_several():
    assert devices.asked_for({"region": 0, "fsdp": 8, "tensor": 1}) == 8


def test_alone_it_refuses_its_own_problems():
    fields = plain(base("diloco", period=5))
    refuse([], fields)
    with pytest.raises(RefusedError, match="2 problems"):
        refuse(["one", "two"], fields)


@pytest.mark.parametrize("kind", ["store", "peers"])
def test_payloads_are_kept_for_as_many_rounds_of_every_fragment(kind, monkeypatch):
    """However many fragments are under way at once."""
    opened = {}
    made = SimpleNamespace(keep_more=lambda times: opened.update(times=times))
    monkeypatch.setattr(assemble, "store", lambda *args, **options: opened.update(options) or made)
    fields = plain(base("streaming_diloco", period=30))
    fields |= {"exchange": kind, "rendezvous": "file:///x", "region": 0}
    method = lc.methods.streaming_diloco(30, 6, 25, 0.5)
    job = SimpleNamespace(config=fields, method=method, faults=None)
    digests = {"corpus_digest": "a" * 64, "tokenizer_digest": "b" * 64}
    open_exchange(job, SimpleNamespace(identity="corpus", summary=digests))
    assert opened["times"] == 6 and (opened["transport"] is None) is (kind == "store")
    said = opened["identity"]
    assert said["data.corpus"].endswith("(digest aaaaaaaaaaaa)") and said["method.period"] == "30"
    assert "region" not in said and "rendezvous" not in said
