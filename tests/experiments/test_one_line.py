"""What an unlucky user gives or has is answered in one line, with no traceback."""

import copy
import errno
import json
import os
import shutil
import sys
import time

import jax
import made_runs
import numpy as np
import pytest

from experiments.__main__ import main
from experiments.cli import load_config
from experiments.metrics import MetricsLog
from experiments.train import disk
from experiments.train.disk import NotSavedError, is_full
from experiments.train.main import missing

CONFIGS = {
    "raises": ("def get_config():\n    raise KeyError('oops')\n", "line 2: KeyError: 'oops'"),
    "at import": ("x = 1\nraise RuntimeError('no')\n", "line 2: RuntimeError: no"),
    "syntax": ("x = 1\n\ndef get_config(:\n", "line 3: SyntaxError: invalid syntax"),
    "import": ("import not_there\n", "line 1: ModuleNotFoundError: No module named 'not_there'"),
    "nothing": ("def get_config():\n    pass\n", "its get_config() returns NoneType"),
    "NUL": ("\0", "cannot contain null bytes"),  # releases of Python word it differently
}


def refused(capfd, *argv):
    """What is printed: one line, and the exit code is that of refusals."""
    jax.devices()  # whose plug-ins may print when they are looked for
    capfd.readouterr()
    assert main(argv) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    return said


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_cannot_be_used(what, tmp_path, capfd):
    text, reason = CONFIGS[what]
    (tmp_path / "mine.py").write_text(text)
    said = refused(capfd, "train", f"--config={tmp_path}/mine.py")
    assert f"--config={tmp_path}/mine.py" in said and reason in said


def test_a_config_of_another_command(capfd):
    said = refused(capfd, "compare", "--config=configs/diloco.py")
    assert "is not for compare (it has no " in said and "configs/compare" in said
    for name in ("compare/quick", "plan/goodput"):
        for asks in ([], ["--help"]):
            said = refused(capfd, "train", *asks, f"--config=configs/{name}.py")
            assert "is not for train (it has no " in said


def test_plan_refuses_other_configs_in_one_line(capfd):
    said = refused(capfd, "plan", "--config=configs/diloco.py")
    assert "is not for plan (it has no methods): give one of configs/plan" in said
    assert "add --target=h100:1x8" in said
    assert "--target" not in refused(capfd, "plan", "--config=configs/compare/quick.py")
    assert "add --goodput" in refused(capfd, "plan", "--config=configs/plan/goodput.py")


def test_a_config_that_its_function_did_not_make(tmp_path, capfd):
    (tmp_path / "mine.py").write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config():\n    return ConfigDict(dict(common={}, variants={}))\n"
    )
    said = refused(capfd, "compare", f"--config={tmp_path}/mine.py", f"--workdir={tmp_path}/w")
    made_by = "experiments.compare.config.comparison"
    assert "the config has no " in said and f"make it with {made_by}" in said


INCOMPLETE = "def get_config():\n    return dict(method={}, steps=3, regions=2)\n"


@pytest.mark.parametrize("command", [("train",), ("train", "--help"), ("launch",)])
def test_a_training_config_that_lacks_fields(command, tmp_path, capfd):
    (tmp_path / "mine.py").write_text(INCOMPLETE)
    said = refused(capfd, *command, f"--config={tmp_path}/mine.py", "--config.steps=4")
    assert "seed" in said and "mesh" in said
    assert "are missing: start from experiments.config.base" in said


def test_quick_announces_nothing_that_it_cannot_do(tmp_path, capfd):
    (tmp_path / "mine.py").write_text(
        "def get_config():\n    return dict(variants={}, common={})\n"
    )
    for given, reason in (
        ((f"--config={tmp_path}/mine.py",), "the config has no baseline, compile_cache, "),
        (("--config.seeds=None",), "seeds=None: give a value, as (0, 1, 2)"),
        (("--config.networks=None",), "networks=None: give a value, as ()"),
        (("--config.parallel=0",), "parallel=0: at least 1 is needed"),
        (("--config.networks=('mars',)",), "'mars' is unknown"),
    ):
        jax.devices()
        capfd.readouterr()
        assert main(("quick", *given)) == 2
        out, said = capfd.readouterr()
        assert out == "" and said.count("\n") == 1 and reason in said


@pytest.mark.parametrize(
    "arguments, line",
    [
        (("sample", "--length=0"), "--length=0: at least 1 is needed"),
        (("sample", "--top_k=0"), "--top_k=0: at least 1 is needed"),
        (("sample", "--temperature=-1"), "--temperature=-1.0: give 0 (greedy) or a positive"),
        (("export", "--output=o", "--dtype=fp8"), "--dtype='fp8': choose float32 or bfloat16"),
    ],
)
def test_flags_are_refused_before_a_run_is_read(arguments, line, tmp_path, capfd):
    assert line in refused(capfd, *arguments, f"--workdir={tmp_path / 'none'}")


VARIED = ("compare", "--config=configs/compare/diloco_period.py")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("report", "x", "--step_seconds=fast"), "--step_seconds=fast: give a number"),
        (("watch", "x", "--port=abc"), "--port=abc: give a whole number"),
        (("watch", "x", "--once=maybe"), "--once=maybe: give true or false"),
        (
            (*VARIED, "--config.vary=method.period=3,6"),
            "write --config.vary=\"('method.period=3,6',)\"",
        ),
        ((*VARIED, "--config.size=big"), "size='big': this comparison has no sizes; leave it out"),
        (
            ("compare", "--config=configs/compare/codec_quality.py", "--config.size=smal"),
            "size='smal' is unknown; did you mean small?",
        ),
        ((*VARIED, "--config.seeds=(0,1"), "--config.seeds=(0,1: give a tuple, as (0,)"),
        (("plan", "--target=h100x8", "--config=diloco"), "'h100x8': write h100:1x8"),
        (("plan", "--target=h900:2x8", "--config=diloco"), "'h900' is unknown"),
        (("plan", "--target=h100:2x8"), "--config is missing: give --config=configs/diloco.py"),
        (("plan", "--target=h100:2x8", "--config=configs/plan/template.py"), "(it has no method, "),
        (("plan", "--target=h100:2x8", "--config=diloco", "x"), "unexpected argument 'x'"),
        (
            ("train", "--config=diloco", "--exchange=my:Transport"),
            "unknown flag --exchange; a field of the config is set by --config.exchange=VALUE",
        ),
        (("quick", "--seeds=2"), "a field of the config is set by --config.seeds=VALUE"),
        (
            ("train", "--config=diloco", "--config.method.codec.name=int4"),
            "there is no such field; write --config.method.codec=int4",
        ),
        (
            (*VARIED, "--config.common.stepz=3"),
            "--config.common.stepz: there is no such field; did you mean steps?",
        ),
        (
            (*VARIED, "--vary=method.period=3", "--config.common.steps=20"),
            "between 0 and the 20 steps of the run; use --config.common.inner.warmup_steps=2",
        ),
        (
            ("compare", "--config=configs/compare/quick.py", "--vary=foo"),
            "cannot compare: vary: 'foo': write field=value,value",
        ),
        (
            ("plan", "--config=configs/plan/template.py", "--config.mfu=-1"),
            "plan: mfu is -1.0: use a number above 0",
        ),
        (("plan", "--goodput", "--config.step_s=-2"), "plan: step_s is -2.0: use a number above 0"),
        (("plan", "--goodput", "--config.regions=abc"), "plan: regions is 'abc'"),
        (("launch", "--config=diloco", "--regions=0"), "launch: --regions=0: give the number of"),
        (("launch", "--config=diloco", "--restarts=-1"), "launch: --restarts=-1: give how often"),
        (("launch", "--config=diloco", "--exchange=mesh"), "launch: --exchange=mesh: all regions"),
        (
            ("launch", "--config=diloco", "--processes=0", "--config.mesh.fsdp=1"),
            "launch: processes=0: give the number of processes of a region, from 1",
        ),
        (
            ("launch", "--config=diloco", "--processes=-1", "--config.mesh.fsdp=1"),
            "launch: processes=-1: give the number of processes of a region, from 1",
        ),
        (("train", "--config=diloco", "--hlp"), "unknown flag --hlp; did you mean --help?"),
        (
            ("compare", "--config=configs/compare/quik.py"),
            "compare: --config=configs/compare/quik.py: there is no such file; did you mean "
            "configs/compare/quick.py",
        ),
        (("compare",), "compare: --config is missing: give --config=configs/compare/quick.py, or"),
        (
            ("plan", "--config=configs/plan/templat.py"),
            "plan: --config=configs/plan/templat.py: there is no such file; did you mean "
            "configs/plan/template.py",
        ),
        (
            ("plan", "--goodput", "--config=nope.py"),
            "plan: --config=nope.py: there is no such file; known: configs/plan/goodput.py",
        ),
        (("bench", "codec", "--size=0"), "bench codec: --size=0: at least 1 is needed"),
        (("bench", "codec", "--rank=0"), "bench codec: --rank=0: at least 1 is needed"),
        (("bench", "codec", "--codecs=,"), "bench codec: --codecs=,: name at least one"),
        (("bench", "engin"), "bench: unknown benchmark 'engin'; did you mean engine?"),
        (("bench", "engine", "--size=tiny"), "bench engine: --size=tiny: use small or reference"),
        (("bench", "gpu", "--stages=,"), "bench gpu: --stages=,: name at least one of speed, "),
        (("watch", "x", "--network=lann"), "watch: --network: 'lann' is unknown (did you mean lan"),
        (("watch", "x", "--port=0", "--once"), "--once prints the present state, --port serves it"),
        (
            (*VARIED, "--config.common.inner.warmup_steps=x"),
            "--config.common.inner.warmup_steps=x: give a whole number",
        ),
        (("train", "--config=diloco", "--config.frozen=(1,)"), "frozen: 1 is no text"),
        (
            ("train", "--config=diloco", "--config.steps=ten"),
            "--config.steps=ten: give a whole number, as ",
        ),
        (
            ("train", "--config=diloco", "--config.method.channels=x"),
            "--config.method.channels: not a setting of a config; write a factory",
        ),
    ],
)
def test_a_value_that_cannot_be_read(arguments, said, capfd):
    assert said in refused(capfd, *arguments)


@pytest.mark.parametrize("name", ["compare/diloco_period", "compare/quick", "paper/diloco_period"])
def test_a_field_of_all_runs(name):
    given = [("common.inner.warmup_steps", "1"), ("common.model.width", "64")]
    config, problems = load_config(f"configs/{name}.py", given)
    assert not problems and config.common.inner.warmup_steps == 1
    for size in config.get("sizes", {}).values():
        assert size.common.inner.warmup_steps == 1 and size.common.model.width == 64


def test_a_field_that_is_there_already_is_set_in_every_size():
    """Given twice the last one counts, as everywhere."""
    given = [("size", "small"), ("common.steps", "300"), ("common.steps", "600")]
    config, problems = load_config("configs/compare/codec_quality.py", given)
    found = [size.common.steps for size in config.sizes.values()]
    assert not problems and {*found, config.common.steps} == {600}


def test_a_folder_that_cannot_be_made(tmp_path, capfd, monkeypatch):
    (tmp_path / "file").write_text("")
    said = refused(capfd, "train", "--config=diloco", f"--workdir={tmp_path}/file/run")
    assert f"cannot be made: {tmp_path}/file is a file" in said
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
    said = refused(capfd, "train", "--config=diloco", f"--workdir={tmp_path}/run")
    assert f"{tmp_path} cannot be written to" in said


METRICS = {
    "binary": (b"\xff\xfe\x00", "no text"),
    "nested": (b'{"kind": ' + b"[" * 100_000 + b"\n", "line 1: nested too deeply"),
    "half a record": (b'{"kind": \n{"kind": "step"}\n', "line 1: not a JSON record"),
    "no record": (b"5\n", "line 1: no record"),
    "no header": (b'{"kind": "resume"}\n', "does not start with a header"),
}


@pytest.mark.parametrize("what", METRICS)
def test_damaged_metrics_are_reported_and_watched(what, tmp_path, capfd):
    data, reason = METRICS[what]
    (tmp_path / "metrics.jsonl").write_bytes(data)
    said = refused(capfd, "report", str(tmp_path))
    assert f"{tmp_path}/metrics.jsonl" in said and reason in said
    (tmp_path / "metrics.jsonl").write_bytes(data.rstrip() + b"\n")  # `watch` reads whole lines
    assert reason in refused(capfd, "watch", str(tmp_path))


RUN = made_runs.header(2, config={"method": {"name": "diloco"}})
STEP = made_runs.step(1, 2, loss=[1.0, 2.0], loss_mean=1.5)
DAMAGED = {  # what is left out of a record, or put into it
    "no loss": (
        lambda run, step: step.pop("loss"),
        "2: step: Object missing required field `loss`",
    ),
    "of text": (
        lambda run, step: step.update(tokens="x"),
        "step: Expected `float`, got `str` - at",
    ),
    "one region": (lambda run, step: step.update(loss=[1.0]), "step: no loss of 2 regions"),
    "an event": (lambda run, step: step["events"].append({}), "field `kind` - at `$.events[0]`"),
    "no data": (
        lambda run, step: run.pop("data"),
        "1: header: Object missing required field `data`",
    ),
    "no tokens": (
        lambda run, step: run.pop("tokens_per_step"),
        "header: Object missing required field `tokens_",
    ),
}


def run_of(folder, change=lambda run, step: None):
    """A run of one step, as it is or damaged."""
    run, step = copy.deepcopy(RUN), copy.deepcopy(STEP)
    change(run, step)
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in (run, step)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("what", DAMAGED)
def test_a_report_on_records_that_lack_something(what, tmp_path, capfd):
    change, reason = DAMAGED[what]
    run_of(tmp_path, change)
    assert reason in refused(capfd, "report", str(tmp_path))
    if what != "no tokens":  # of which only reports have need
        assert reason in refused(capfd, "watch", str(tmp_path))


def test_a_run_that_has_made_no_step_yet(tmp_path, capfd):
    folder = run_of(tmp_path / "run")
    first = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (folder / "metrics.jsonl").write_text(first)
    assert main(["report", str(folder), f"--html={tmp_path}/page.html"]) == 0


PLANS = {
    "cut": (b'{"answer": {"rows": {"dil', "no JSON"),
    "binary": (b"\xff\xfe\x00", "no text in UTF-8"),
    "nested": (b"[" * 100_000, "nested too deeply"),
    "no plan": (b"[]", "no plan (Expected `object`, got `array`)"),
    "no answer": (b'{"rows": []}', "no plan (Object missing required field `answer`)"),
    "no rows": (b'{"answer": {"rows": {}}}', "no plan (Object missing required field `rows`)"),
    "odd rows": (b'{"rows": [1]}', "no plan (Expected `object`, got `int` - at `$.rows[0]`)"),
    "no method": (
        b'{"rows": [{}]}',
        "no plan (Object missing required field `method` - at `$.rows[0]`)",
    ),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_damaged_plan(what, tmp_path, capfd):
    data, reason = PLANS[what]
    (tmp_path / "plan.json").write_bytes(data)
    said = refused(capfd, "report", str(run_of(tmp_path / "run")), f"--against={tmp_path}")
    assert f"{tmp_path}/plan.json: {reason}" in said


@pytest.mark.parametrize("command", ["train", "sample", "export"])
@pytest.mark.parametrize("data", [b'{"a":', b"\xff", b"[" * 100_000, b"[]"])
def test_a_damaged_config_in_a_folder(command, data, tmp_path, capfd):
    (tmp_path / "config.json").write_bytes(data)
    more = {"train": ["--config=diloco"], "sample": ["--prompt=a"], "export": ["--output=x"]}
    said = refused(capfd, command, f"--workdir={tmp_path}", *more[command])
    assert f"{tmp_path}/config.json: " in said and "put the run's own back" in said


def test_a_file_that_cannot_be_written_there(tmp_path, capfd):
    folder = run_of(tmp_path / "run")
    said = refused(capfd, "report", str(folder), f"--json={tmp_path}")
    assert said == f"report: {tmp_path}: Is a directory\n"


class NoFolder:
    """Matplotlib where no folder can be written, not even a temporary one."""

    def find_spec(self, name, *_):
        if name == "matplotlib":
            raise OSError("Matplotlib requires access to a writable cache directory")


def test_a_report_without_a_folder_for_matplotlib(tmp_path, monkeypatch, capfd):
    folder = run_of(tmp_path / "run")
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoFolder(), *sys.meta_path])
    assert main(["report", str(folder)]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "loss curves are not drawn: Matplotlib requires access to a writable" in said
    assert "Matplotlib requires" in refused(capfd, "report", str(folder), f"--html={tmp_path}/x")


def test_a_file_system_that_is_read_only(tmp_path, monkeypatch, capfd):
    def write(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    folder = run_of(tmp_path / "run")
    monkeypatch.setattr("pathlib.Path.write_text", write)
    said = refused(capfd, "report", str(folder), f"--json={tmp_path}/x.json")
    assert said == f"report: {tmp_path}/x.json: Read-only file system\n"


# -- a full disk ----------------------------------------------------------------------------------


def test_a_save_that_cannot_fit_is_not_begun(tmp_path, monkeypatch):
    usage = disk.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=4000))
    words = "a checkpoint needs 4.01 kB, and 4 kB are free; none is there yet. Make room"
    with pytest.raises(NotSavedError, match=words):
        disk.require_room(tmp_path, np.zeros(4010, "i1"), [])
    disk.require_room(tmp_path, np.zeros(4000, "i1"), [])  # it fits


@pytest.mark.slow
def test_a_checkpoint_for_which_there_is_no_room(tiny, root, monkeypatch, capfd):
    """With room the same command goes on; and no name of a run is taken for markup."""
    given = [*tiny.arguments(root), "--config.steps=4", f"--workdir={root}/run[/x]"]
    command = ["train", "--config=diloco", *given, "--quiet"]
    usage = disk.shutil.disk_usage(root)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert main(command) == NotSavedError.code
    said = capfd.readouterr().err
    assert said.startswith(f"train: {root}/run[/x]: a checkpoint needs ")
    assert "1 kB are free; none is there yet. Make room" in said and said.count("\n") == 1
    monkeypatch.undo()
    assert main(command) == 0 == main(["report", f"{root}/run[/x]"])
    assert "run[/x]" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_goes_on_without_its_metrics_and_says_so(tiny, root, capfd):
    given = [*tiny.arguments(root), "--config.steps=6", "--config.checkpoint.every=2"]
    command = ["train", "--config=diloco", *given, f"--workdir={root}/run"]
    assert main(command) == 0
    newest = max((root / "run" / "checkpoints").iterdir(), key=lambda x: int(x.name))
    shutil.rmtree(newest)  # of the end
    (root / "run" / "metrics.jsonl").unlink()
    capfd.readouterr()
    assert main(command) == 0
    assert f"{root}/run/metrics.jsonl lacks steps 1 to 4" in capfd.readouterr().out


@pytest.mark.parametrize(
    "newest, step, lacks",
    [
        (None, 4, "1 to 4"),
        ({"step": 2}, 4, "3 to 4"),
        ({"step": 4}, 4, None),
        ({"step": 6}, 4, None),
    ],
)
def test_steps_whose_metrics_were_deleted_are_named(newest, step, lacks):
    said = missing(newest, step)
    assert (said is None) == (lacks is None)
    assert lacks is None or said.startswith(f"lacks steps {lacks}, which the checkpoint has")


def test_a_disk_that_is_filled_meanwhile(tmp_path):
    filled = pytest.raises(NotSavedError, match="filled the disk; that of step 7 is safe")
    with filled, disk.written(tmp_path, [3, 7]):
        raise ValueError("INTERNAL: write: No space left on device")
    with pytest.raises(KeyError), disk.written(tmp_path, []):
        raise KeyError("something else")


@pytest.mark.slow
def test_a_folder_that_takes_no_files_any_more(tiny, root, monkeypatch, capfd):
    """One line and code 74 at once; made writable again, the same command goes on."""
    workdir = root / "read-only"
    given = [*tiny.arguments(root), "--config.steps=8", "--config.checkpoint.every=4"]
    given += ["--config.log.every=4", "--config.eval.every=0"]
    command = ["train", "--config=diloco", *given, "--quiet", f"--workdir={workdir}"]
    makes, begins = os.mkdir, []

    def refuses(path, *more, **others):
        if f"{workdir}/checkpoints/8.unfinished" in str(path):
            begins.append(time.monotonic())
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return makes(path, *more, **others)

    jax.devices()  # whose plug-ins may print when they are looked for
    monkeypatch.setattr(os, "mkdir", refuses)
    assert main(command) == NotSavedError.code
    assert time.monotonic() - begins[0] < 100  # Orbax's own threads would wait for 300 s
    said = capfd.readouterr().err
    assert said == (
        f"train: {workdir}: a checkpoint cannot be written (Read-only file system); that of step 4 "
        "is safe. Make the folder writable, then run the same command to continue\n"
    )
    monkeypatch.undo()
    assert main(command) == 0


def test_the_file_that_could_not_be_written_is_named(tmp_path):
    full = tmp_path / "metrics.jsonl"
    full.symlink_to("/dev/full")
    log = MetricsLog(full, -1)
    with pytest.raises(OSError, match=r"No space left on device: '.*/metrics\.jsonl'") as caught:
        log.write([{"kind": "step"}])
    assert caught.value.errno == errno.ENOSPC and is_full(caught.value)
    assert is_full(RuntimeError("x")) is False
