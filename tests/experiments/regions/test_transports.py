"""Transports as configs name them: one of one's own trains, wrong ones are refused."""

import json
import sys

import jax
import numpy as np
import pytest

from experiments.__main__ import main
from experiments.regions import transports
from experiments.report.runlog import read_run
from experiments.trained.anchor import load_trained
from lowcomm_jax.checkpoint import store
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.store.peers_transport import PeersTransport
from lowcomm_jax.store.transport import StoreTransport

OWN = "examples.http_transport:HttpTransport"


def command(tiny, root, exchange, *more):
    given = ["launch", "--config=diloco", *tiny.arguments(root), f"--exchange={exchange}"]
    return [*given, "--config.regions=2", "--config.method.period=4", "--config.steps=8", *more]


def last_anchor(workdir):
    """Leaves of the anchor in a region's last checkpoint, by name."""
    folders = store.steps(workdir / "checkpoints")
    path = folders[max(folders)]
    arrays = store.read_arrays(path, store.read_document(path))
    return {name: x for name, x in arrays.items() if "anchor" in name}


def test_two_jobs_train_by_a_transport_of_ones_own(tiny, root, monkeypatch):
    workdir = root / "http"
    assert main(command(tiny, root, OWN, f"--workdir={workdir}", "--config.eval.every=0")) == 0
    one, other = (last_anchor(workdir / f"region{region}") for region in range(2))
    assert one and one.keys() == other.keys()
    for name, leaf in one.items():
        np.testing.assert_array_equal(leaf, other[name])
    for region in range(2):
        events = [e for s in read_run(workdir / f"region{region}").steps for e in s["events"]]
        landings = [e["participants"] for e in events if e["kind"] == "land"]
        assert len(landings) == 2 and all(map(all, landings)), landings
    blobs = [path for path in (workdir / "rendezvous").rglob("blob/*")]
    assert not blobs, "nothing but records is in the folder"
    is_read_where_it_cannot_train(workdir / "region0", one, monkeypatch)


def is_read_where_it_cannot_train(workdir, anchor, monkeypatch):
    """A region's folder elsewhere: no module of the transport, no secret, no folder to meet in."""
    config = json.loads((workdir / "config.json").read_text())
    config |= {"rendezvous": (workdir / "gone").as_uri(), "secret": "env:NO_SECRET"}
    config |= {"address": "no.host:7", "listen": "no.host:8"}
    (workdir / "config.json").write_text(json.dumps(config))
    monkeypatch.setitem(sys.modules, OWN.partition(":")[0], None)
    assert main(["sample", f"--workdir={workdir}", "--length=4"]) == 0
    trained = load_trained(workdir)
    found = jax.tree_util.tree_leaves_with_path(trained.params)
    assert len(found) == len(anchor) and trained.run.exchange is None
    for path, leaf in found:
        np.testing.assert_array_equal(leaf, anchor[f"anchor/{path_name(path)}"][0])
    state = trained.run.engine.init(trained.params)
    with pytest.raises(ValueError, match="no open exchange; give"):
        trained.run.engine.sync_loop(state)
    assert not (workdir / "gone").exists()


REFUSED = [
    ("pears", (), "use mesh, store or peers; your own: module:Class"),
    ("no_module:Whole", (), "No module named 'no_module'; name a module that Python finds from"),
    ("own_transports:Hole", (), "own_transports has no class 'Hole'; did you mean Whole?"),
    ("own_transports:number", (), "own_transports has no class 'number'"),
    ("own_transports:Half", (), "Half has no lingers, get, drop: write what lowcomm_jax.exchange"),
    ("own_transports:SaysLater", (), "make name a text and lingers True or False, both of the cl"),
    ("own_transports:NeedsBucket", (), "NeedsBucket needs bucket: give it a default (keywords th"),
    (
        "own_transports:NeedsAddressByPlace",
        (),
        "NeedsAddressByPlace needs address: give it a de",
    ),
    ("own_transports:NothingMade", (), "NothingMade cannot be made of a context: write a co"),
    ("own_transports:ForNoContext", (), "ForNoContext cannot be made of a context: write a co"),
    ("own_transports:ContextByName", (), "ContextByName cannot be made of a context: write a co"),
    ("own_transports:NoProtocol", (), "NoProtocol cannot be made of a context: write a co"),
    ("own_transports:LeavesOpen", (), "LeavesOpen has no connect: write what lowcomm_jax.exchang"),
    (":Whole", (), "exchange=':Whole': it names no module: write module:class"),
    ("own_transports:", (), "exchange='own_transports:': it names no class: write module:class"),
    ("own_transports:NeedsPlace", (), "address is missing: exchange=own_transports:NeedsPlace ne"),
    ("own_transports:Whole", ("certificates=x",), "certificates='x' has no effect with exchange=o"),
    ("peers", ("address=0.0.0.0:0",), "address='0.0.0.0:0' is no address of one machine: give"),
]


@pytest.mark.parametrize(("exchange", "fields", "line"), REFUSED)
def test_a_wrong_transport_is_refused_in_one_line(tiny, root, capsys, exchange, fields, line):
    more = [f"--config.{field}" for field in fields]
    workdir = root / "none"
    assert main(command(tiny, root, exchange, f"--workdir={workdir}", *more)) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.startswith("launch: ") and line in shown, shown
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        (
            ("address=nonsense",),
            "HttpTransport: address='nonsense': give HOST:PORT, port 0 for a f",
        ),
        (("secret=env:LOWCOMM_NONE",), "secret 'env:LOWCOMM_NONE': there is no such variable in"),
    ],
)
def test_what_cannot_be_opened_is_told_by_what_it_is(tiny, root, capsys, fields, shown):
    given = [*tiny.arguments(root), f"--workdir={root / 'unopened'}", "--config.region=0"]
    given += [f"--config.exchange={OWN}", f"--config.rendezvous={(root / 'there').as_uri()}"]
    assert main(["train", "--config=diloco", *given, *(f"--config.{x}" for x in fields)]) == 2
    assert " ".join(capsys.readouterr().err.split()).startswith(f"cannot start: {shown}")


def test_a_transport_that_takes_any_keyword_gets_all_fields():
    fields = {"exchange": "own_transports:TakesAny", "listen": None}
    fields |= {"address": "x:1", "certificates": "y"}
    found, problems = transports.of(fields)
    assert not problems and not transports.misfits(found, fields)
    made = transports.transport(fields)("context")
    assert made.context == "context"
    assert made.settings == {"address": "x:1", "certificates": "y"}


def test_names_stand_for_the_transports_of_the_package():
    """They say of themselves what a run asks of them."""
    for name, kind in (("store", StoreTransport), ("peers", PeersTransport)):
        assert kind.name == name and transports.find(name).lingers is kind.lingers
    assert set(transports.find("peers").takes) == set(transports.FIELDS)
    assert not transports.find("store").takes
