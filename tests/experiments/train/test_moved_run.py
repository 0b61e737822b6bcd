"""A run that is continued elsewhere learns the same; what would change that is refused by name."""

import json
import shutil

import jax
import numpy as np
import pytest
import yaml

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.report.runlog import read_run
from experiments.train import header
from experiments.trained.anchor import load_trained
from experiments.workdir import METRICS

STEPS, HALF = 12, 6
ARGUMENTS = (
    "--config=streaming_diloco",
    f"--config.steps={STEPS}",
    "--config.method.period=4",
    "--config.method.fragments=2",
    "--config.method.overlap=3",  # payloads are in flight at HALF
    "--config.batch=4",
    "--config.regions=2",
    "--config.model.layers=2",
    "--config.inner.warmup_steps=2",
    "--config.eval.every=0",
    f"--config.checkpoint.every={HALF}",
    "--config.checkpoint.keep_last=9",
)


def train(tiny, root, workdir, *more):
    """Exit code of a run; a later flag takes the place of an earlier one."""
    return main(["train", *tiny.arguments(root, *ARGUMENTS, *more, f"--workdir={workdir}")])


def back_to_half(whole, workdir):
    """A copy of a finished run as a kill after its first checkpoint leaves it."""
    shutil.copytree(whole, workdir)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    return workdir


def anchor(workdir):
    return {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(load_trained(workdir).params)
    }


def resumed(workdir):
    return next(r for r in read_records(workdir / METRICS) if r["kind"] == "resume")


@pytest.fixture(scope="module")
def whole(tiny, root):
    assert train(tiny, root, root / "whole") == 0
    return root / "whole"


@pytest.fixture
def begun(tiny, root, tmp_path, capsys):
    """A folder as a run leaves it, without what its checkpoint would hold."""
    config = yaml.safe_load(accepted(tiny, root, tmp_path / "begun", capsys))["config"]
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "begun" / "config.json").write_text(json.dumps(config))
    return tmp_path / "begun"


def accepted(tiny, root, workdir, capsys, *more):
    """What `--print-config` shows of a run that may begin or go on."""
    capsys.readouterr()
    assert train(tiny, root, workdir, "--print-config", *more) == 0
    return capsys.readouterr().out


def refused(tiny, root, workdir, capsys, *more):
    capsys.readouterr()
    assert train(tiny, root, workdir, *more) == 2
    return capsys.readouterr().err


PLACES = {
    "accumulate": 2,
    "block": 3,
    "codec_error": True,
    "concurrent_exchange": False,
    "data.cache_dir": "elsewhere",
    "eval.batch": 4,
    "eval.every": 3,
    "eval.sequences": 10,
    "mesh.fsdp": 2,
    "mesh.region": 2,
    "mesh.tensor": 2,
    "model.attention": "xla",
    "model.layer_loop": "auto",
    "model.remat": "full",
    "offload": True,
    "replicas": "vmap",
}


def test_places_may_change(tiny, root, begun, capsys):
    """All at once: a refusal would name each that decides what is learnt."""
    accepted(tiny, root, begun, capsys, *(f"--config.{k}={v}" for k, v in PLACES.items()))


def test_a_corpus_may_lie_elsewhere(tiny, root, begun, capsys):
    shutil.copytree(root / "texts", begun.parent / "texts")
    corpus = f"--config.data.corpus=text:{begun.parent / 'texts'}"
    accepted(tiny, root, begun, capsys, corpus)


LEARNT = {  # there, here
    "inner.learning_rate": ("0.002", "0.5"),
    "model.layer_loop": ("unrolled", "scan"),
    "data.sharding": ("iid", "topic"),
    "mesh.stage": ("1", "2"),
    "steps": (str(STEPS), "40"),
}


def test_what_decides_what_is_learnt_stays(tiny, root, begun, capsys):
    given = [f"--config.{field}={here}" for field, (_, here) in LEARNT.items()]
    said = refused(tiny, root, begun, capsys, *given)
    for field, (there, here) in LEARNT.items():
        assert f"{field}: {there} -> {here}" in said, said
    assert f"--config.model.init_from={begun}" in said


def test_names_of_parameters_are_those_of_the_first_device(tiny, root, begun, capsys):
    """Off CPUs `auto` stacks layers; here it would not."""
    config = json.loads((begun / "config.json").read_text())
    config["model"]["layer_loop"] = "scan"
    (begun / "config.json").write_text(json.dumps(config))
    assert "layer_loop: scan" in accepted(tiny, root, begun, capsys)


def test_regions_whose_parameters_have_other_names_do_not_meet(tiny, root, tmp_path, capsys):
    """One on a CPU, one on a GPU: the second is told before it waits, and what to give runs."""
    meet = ("--config.exchange=store", f"--config.rendezvous=file://{tmp_path}/meet")
    meet += ("--config.wait_minutes=0.005",)
    alone = refused(tiny, root, tmp_path / "r0", capsys, *meet, "--config.region=0")
    assert "regions [1] of run" in alone
    of_one = (*meet, "--config.region=1")
    said = refused(tiny, root, tmp_path / "r1", capsys, *of_one, "--config.model.layer_loop=scan")
    assert "model.layer_loop: unrolled in the region that came first -> scan here" in said
    assert "for scan, begin in another rendezvous" in said
    fix = said[said.index("--config.model.layer_loop=") :].strip()
    said = refused(tiny, root, tmp_path / "r1", capsys, *of_one, fix)
    assert "layer_loop" not in said and "regions [0] of run" in said


@pytest.mark.slow
def test_it_goes_on_on_another_mesh_in_other_folders(tiny, root, whole, capsys):
    """In flight are payloads of the old mesh; two regions then have two devices each."""
    moved = back_to_half(whole, root / "moved")
    shutil.copytree(root / "texts", root / "texts_elsewhere")
    places = {
        "mesh.region": 2,
        "mesh.fsdp": 2,
        "accumulate": 2,
        "block": 3,
        "data.cache_dir": root / "cache_elsewhere",
        "data.corpus": f"text:{root / 'texts_elsewhere'}",
        "eval.every": 3,
        "eval.sequences": 10,
        "model.remat": "full",
        "replicas": "vmap",
    }
    capsys.readouterr()
    assert train(tiny, root, moved, *(f"--config.{k}={v}" for k, v in places.items())) == 0
    said = capsys.readouterr().out
    assert f"continues after step {HALF}" in said
    lines = [line for line in said.splitlines() if line.startswith("changed")]
    assert lines == [
        "changed  accumulate 1 -> 2, block 16 -> 3, mesh.fsdp 1 -> 2, mesh.region 1 -> 2, "
        "model.remat none -> full, replicas map -> vmap: numbers may differ in their last digits",
        "changed  eval.sequences 20 -> 10: losses before and after are of other texts",
    ]
    assert resumed(moved)["changed"] == [line.removeprefix("changed  ") for line in lines]
    records = read_records(moved / METRICS)
    assert [r["kind"] for r in records].count("eval_set") == 2
    assert [r["step"] for r in read_run(moved).evals] == [
        r["step"] for r in records[records.index(resumed(moved)) :] if r["kind"] == "eval"
    ]
    expected, got = anchor(whole), anchor(moved)
    assert expected.keys() == got.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_in_its_own_place_it_says_nothing_and_repeats_its_bits(tiny, root, whole, capsys):
    same = back_to_half(whole, root / "same")
    capsys.readouterr()
    assert train(tiny, root, same) == 0
    assert "changed  " not in capsys.readouterr().out and "changed" not in resumed(same)
    for name, values in anchor(whole).items():
        assert anchor(same)[name].tobytes() == values.tobytes()


@pytest.mark.slow
def test_another_text_is_refused_by_its_digest(tiny, root, whole, capsys):
    other = root / "texts_changed"
    shutil.copytree(root / "texts", other)
    (other / "0.txt").write_text("another text of quite other words")
    before = (whole / "config.json").read_text()
    said = refused(tiny, root, whole, capsys, f"--config.data.corpus=text:{other}")
    assert "data.corpus: text:" in said and "-> text:" in said and said.count("digest") == 2
    assert f"--config.model.init_from={whole}" in said
    assert (whole / "config.json").read_text() == before


@pytest.mark.slow
def test_names_of_parameters_stay_where_the_device_would_choose_others(tiny, root):
    """Off CPUs `auto` stacks layers; here it does not. The run's own way goes on."""
    begun = root / "begun_on_a_gpu"
    assert train(tiny, root, begun, "--config.model.layer_loop=scan", "--config.eval.every=0") == 0
    moved = back_to_half(begun, root / "moved_to_a_cpu")
    assert train(tiny, root, moved) == 0
    assert json.loads((moved / "config.json").read_text())["model"]["layer_loop"] == "scan"
    for name, values in anchor(begun).items():
        assert anchor(moved)[name].tobytes() == values.tobytes()
    new = root / "from_its_weights"  # what the refusal of another layer_loop names
    more = (f"--config.model.init_from={begun}", "--config.model.layer_loop=unrolled")
    assert train(tiny, root, new, *more, "--config.steps=3", "--config.inner.warmup_steps=1") == 0


def test_what_has_changed_is_named_with_its_colons(monkeypatch):
    monkeypatch.setattr(header, "place", lambda run: {"device": "card: b", "unroll": True})
    said = header.changes({"device": "card: a", "unroll": True}, None)
    assert said == ["device card: a -> card: b: numbers may differ in their last digits"]


def test_a_log_is_read_with_the_set_of_the_last_evaluation(whole, tmp_path):
    """A run that goes on with another set has not evaluated yet; then only that one counts."""
    run = shutil.copytree(whole, tmp_path / "run")
    with (run / METRICS).open("a") as log:
        log.write(json.dumps({"kind": "eval_set", "document": [0], "count": [3]}) + "\n")
    found = read_run(run)
    assert len(found.eval_count) == len(found.evals[-1]["document_sum"]) > 1
    last = {**found.evals[-1], "step": STEPS + 1, "document_sum": [6.0], "anchor": 2.0}
    with (run / METRICS).open("a") as log:
        log.write(json.dumps(last) + "\n")
    found = read_run(run)
    assert found.evals == [last] and found.eval_count.tolist() == [3]
