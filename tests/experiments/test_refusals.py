"""The commands' table of refusals: every row is met, and its line says what to do."""

import importlib.util
import subprocess
import sys

import pytest

from experiments import refusals
from experiments.__main__ import main
from experiments.bench import codec, engine, gpu  # noqa: F401  (before packages are missing)
from experiments.compare.config import comparison, panel, variant
from experiments.config import base, plain
from experiments.faults.fault import Fault
from experiments.faults.happened import Happened, Rejoin, Settings
from experiments.refusals import (
    COMPARISON,
    FLAGS,
    LAUNCH,
    PROCESSES,
    TRAIN,
    Asked,
    comparison_problems,
    run_problems,
)
from experiments.train.methods import make_method
from experiments.train.resolve import steps_of
from lowcomm_jax import make_mesh
from lowcomm_jax.models import preset
from lowcomm_jax.refused import found_by

JOB = {"exchange": "store", "region": 0, "rendezvous": "file:///tmp/x"}
STAGED = {"mesh.stage": 2}
STEPS = 600
KNOBS = {
    "diloco": {"period": 4},
    "noloco": {"period": 4},
    "eager_diloco": {"period": 4},
    "adloco": {"period": 4},
    "async_local_sgd": {"period": 4, "speeds": (1.0,) * 4},
}


def happened(*rejoined, left_out=()):
    left_out = dict.fromkeys(left_out, (1,))
    return Happened(Settings(4, STEPS, "diloco", 4, 0), left_out, {}, {}, rejoined)


CAME, KILL = Rejoin(8, 1), Fault(4, "kill", 1, steps=3)
# (method, fields, faults, what the line says).
RUNS = [
    ("diloco", {"batch": 0}, (), "batch=0: at least 1"),
    ("diloco", {"eval.sequences": 0}, (), "eval.sequences=0: at least 1"),
    ("diloco", {"eval.batch": -1}, (), "eval.batch=-1: at least 1"),
    ("diloco", {"log.every": 0}, (), "log.every=0: at least 1"),
    ("diloco", {"checkpoint.keep_last": 0}, (), "checkpoint.keep_last=0: at least 1"),
    ("diloco", {"eval.every": -1}, (), "eval.every=-1: give 0 (off)"),
    ("diloco", {"checkpoint.every": -1}, (), "checkpoint.every=-1: give 0 (off)"),
    ("diloco", {"microbatches": -1}, (), "microbatches=-1: give 0 (automatic)"),
    ("diloco", {"participation": float("nan")}, (), "participation=nan: give a chance"),
    ("diloco", {"seed": -1}, (), "seed=-1: give a whole number"),
    ("diloco", {"frozen": [3]}, (), "frozen: 3 is no text"),
    ("diloco", {"frozen": ["("]}, (), "frozen: '(' is no regular expression"),
    ("diloco", {"steps": 0}, (), "steps=0: give steps, or tokens"),
    ("diloco", {"tokens": 9}, (), "steps=600 and tokens=9: give one"),
    ("diloco", {"steps": 0, "tokens": 0}, (), "tokens=0: at least 1"),
    ("diloco", {"data.seq_len": 9999}, (), "data.seq_len=9999 is longer than the model"),
    ("diloco", {"batch": 6, "accumulate": 4}, (), "accumulate=4 microbatches: use a multiple"),
    ("diloco", {"batch": 3, "mesh.fsdp": 2}, (), "over fsdp=2 devices of a region: use a"),
    ("diloco", {"batch": 10**12}, (), "a region's samples of one step take 1,028,000 GB, and thi"),
    ("diloco", {"log.tensorboard": True}, (), "log.tensorboard: the package tensorboardX is"),
    ("diloco", {"log.wandb": "it"}, (), "log.wandb: the package wandb is missing: pip"),
    ("diloco", {"log.prometheus": 1}, (), "log.prometheus: the package prometheus_client"),
    ("diloco", {"microbatches": 3}, (), "microbatches=3: they are for pipeline stages"),
    ("diloco", {"pipeline_schedule": "1f1b"}, (), "pipeline_schedule needs pipeline stages"),
    ("diloco", {"random_routing": True}, (), "random_routing needs pipeline stages"),
    ("diloco", {**STAGED, "pipeline_schedule": "x"}, (), "pipeline_schedule: schedule 'x' is"),
    ("diloco", {**STAGED, "model.name": "m:f"}, (), "mesh.stage=2: stages are cut of the built-in"),
    ("diloco", {**STAGED, "model.layer_loop": "unrolled"}, (), "mesh.stage: layer_loop="),
    (
        "diloco",
        {**STAGED, "microbatches": 3},
        (),
        "does not divide into microbatches=3 over fsdp=1",
    ),
    ("diloco", {"processes": -1}, (), "processes=-1: give how many"),
    ("diloco", {"processes": 1, "process": 0}, (), "process=0 has no effect with one process"),
    ("diloco", {"processes": 1, "coordinator": "a:1"}, (), "coordinator='a:1' has no effect"),
    ("diloco", {"processes": 2, "process": 2}, (), "process=2: say which of the 2 this is, 0 to 1"),
    ("diloco", {"process": -1}, (), "process=-1: say which this is, from 0"),
    ("diloco", {"processes": 2, "coordinator": "a"}, (), "coordinator='a': give HOST:PORT"),
    ("diloco", {"processes": 2, "coordinator": "::1:8"}, (), "IPv6 as [::1]:PORT"),
    ("diloco", {"processes": 2, "mesh.region": 3, "mesh.fsdp": 1}, (), "mesh of 3 devices does"),
    ("diloco", {"exchange": "pears"}, (), "exchange='pears': use mesh, store or peers"),
    ("diloco", {"region": 1}, (), "region=1 has no effect with exchange=mesh"),
    ("diloco", {"rendezvous": "x"}, (), "rendezvous='x' has no effect with exchange=mesh"),
    ("diloco", {"secret": "x"}, (), "secret='x' has no effect with exchange=mesh"),
    ("diloco", {"address": "a:1"}, (), "address='a:1' has no effect with exchange=mesh"),
    ("diloco", {"listen": "a:1"}, (), "listen='a:1' has no effect with exchange=mesh"),
    ("diloco", {"certificates": "x"}, (), "certificates='x' has no effect with exchange=mesh"),
    ("diloco", {"deadline_s": 9.0}, (), "deadline_s=9.0 has no effect with exchange=mesh"),
    ("diloco", {"heal": "majority"}, (), "heal='majority' has no effect with exchange=mesh"),
    ("diloco", {**JOB, "address": "a:1"}, (), "address='a:1' has no effect with exchange=store"),
    ("diloco", {**JOB, "listen": "a:1"}, (), "listen='a:1' has no effect with exchange=store"),
    ("diloco", {**JOB, "certificates": "x"}, (), "certificates='x' has no effect with"),
    ("diloco", {**JOB, "region": 4}, (), "region=4: say which of the 4 this job is, 0 to 3"),
    ("diloco", {**JOB, "rendezvous": None}, (), "rendezvous is missing: give a folder"),
    ("diloco", {**JOB, "rendezvous": "x"}, (), "rendezvous: url 'x' must begin with"),
    ("diloco", {**JOB, "heal": "x"}, (), "heal='x': choose one of stop, majority, lowest"),
    ("diloco", {**JOB, "wait_minutes": 0.0}, (), "wait_minutes=0.0: give a time above 0"),
    ("diloco", {**JOB, "participation": 0.5}, (), "participation=0.5: with jobs of their own"),
    ("async_local_sgd", {**JOB, "steps": 2}, (), "steps=2: the first round is at step 4"),
    ("diloco", {"adaptive.scaling": "sqrt"}, (), "adaptive.scaling='sqrt' has no effect: diloco"),
    ("diloco", {"adaptive.largest_microbatch": 2}, (), "adaptive.largest_microbatch=2 has no"),
    ("adloco", STAGED, (), "mesh.stage=2: stages need microbatches of one size"),
    ("diloco", {"faults": "f"}, (Fault(None, "stop", 1, time=3.0),), "faults='f' go by time"),
    ("adloco", {}, (Fault(4, "nan", 1),), "faults: kind nan is not for batches that grow"),
    ("adloco", {}, (KILL,), "a region that is killed does not come back where batches grow: use"),
    ("diloco", {"offload": True}, (KILL,), "a region that is killed does not come back with off"),
    ("diloco", {"offload": True}, happened(CAME), "a region that was lost does not come back wi"),
    ("diloco", {**JOB, "faults": "f"}, happened(), "faults='f' is what happened to jobs: replay"),
    ("diloco", {}, happened(Rejoin(8, 1, 4)), "region 1 came back at step 8 with the inner opti"),
    ("adloco", {}, happened(), "faults: jobs of adloco leave no record to repeat: leave faults"),
    ("noloco", {}, happened(CAME), "with noloco a region comes back with the anchor of another"),
    ("noloco", {}, happened(left_out=(STEPS,)), "left out at the last step, 600, a simulation"),
    ("eager_diloco", {}, happened(left_out=(4,)), "jobs lose payloads that were left out, a sim"),
    ("diloco", {"weights": "tokens"}, happened(left_out=(4,)), "jobs count tokens of payloads"),
]


def asked(method, changes, faults):
    config = base(method, **KNOBS[method])
    config.update_from_flattened_dict(changes)
    fields = plain(config)
    fsdp = fields["mesh"]["fsdp"] or 1
    mesh = make_mesh(region=1, stage=fields["mesh"]["stage"], fsdp=fsdp)
    given = {
        k: v for k, v in fields["model"].items() if v is not None and k not in ("name", "preset")
    }
    model = preset("nano", **{"vocab_size": 320, "layer_loop": "scan", **given})
    made, _ = make_method(fields["method"])
    return Asked(fields, steps_of(fields), made, mesh, model, faults, memory=16 * 10**9)


@pytest.mark.parametrize(("method", "changes", "faults", "line"), RUNS)
def test_a_run(method, changes, faults, line, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [found] = run_problems(asked(method, changes, faults))
    assert line in found


def test_nothing_is_wrong_with_a_config_as_it_is():
    for method in KNOBS:
        assert not run_problems(asked(method, {}, ()))


NOWHERE = {**JOB, "exchange": "peers", "address": "0.0.0.0:1"}


def test_where_the_others_cannot_reach_a_job_and_where_files_are_too_few(monkeypatch):
    [found] = run_problems(asked("diloco", NOWHERE, ()))
    assert found.startswith("address='0.0.0.0:1' is no address of one machine")
    monkeypatch.setattr(
        refusals, "file_handle_problems", lambda count, peers: ["few", count, peers]
    )
    assert run_problems(asked("diloco", JOB, ())) == ["few", "4", "False"]


def test_every_row_of_a_run_is_met(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(refusals, "file_handle_problems", lambda *_: ["few"])
    runs = [asked(*run[:3]) for run in [*RUNS, ("diloco", NOWHERE, ())]]
    unmet = [row for row in TRAIN if not any(row.wrong(r) for r in runs)]
    assert not unmet, [row.text for row in unmet]


GOOD = {"a": variant("diloco"), "b": variant("ddp")}
SIZES = {"small": {"variants": GOOD, "size": 1}}
COMPARISONS = [
    (comparison(GOOD, "a", size="small"), ["size='small': this comparison has no sizes"]),
    (comparison(sizes=SIZES, size="smal"), ["size='smal' is unknown; did you mean small?"]),
    (comparison(GOOD, "b", sizes=SIZES, size="smal"), ["size='smal' is unknown; did you mean"]),
    (comparison(GOOD, "a", sizes=SIZES, size="small"), ["sizes.small.size: a size sets common, v"]),
    (comparison({}, "a"), ["variants: none is given"]),
    (comparison({"b/c": variant("ddp")}, "b/c"), ["variants: 'b/c' is no folder name"]),
    (comparison({"a": {"config": "ddp"}}, "a"), ["a: make it by experiments.compare.config.var"]),
    (comparison({"a": variant("ddp", seed=1)}, "a"), ["a: sets seed"]),
    (comparison(GOOD, "a", seeds=()), ["seeds=(): give whole numbers"]),
    (comparison(GOOD, "a", draws=3), ["draws=3 has no effect: say of what in `vary`"]),
    (comparison(GOOD, "a", seeds=(1, True)), ["seeds=(1, True): give whole numbers"]),
    (comparison(GOOD, "a", parallel=0), ["parallel=0: at least 1"]),
    (comparison(GOOD, "aa"), ["baseline='aa' is no variant; did you mean a?"]),
    (comparison(GOOD, "a", step_seconds=0.0), ["step_seconds=0.0: give finite seconds"]),
    (comparison(GOOD, "a", equal="byte"), ["equal='byte' is unknown; did you mean bytes?"]),
    (
        comparison({**GOOD, "b": variant("ddp", tokens=5, steps=6)}, "a", equal="bytes"),
        ["b: sets tokens, but with equal='bytes'", "b: sets steps, but with equal='bytes'"],
    ),
    (comparison(GOOD, "a", equal="time"), ["equal='time': on which network?"]),
    (
        comparison(GOOD, "a", panels={"p": panel("title", ("a", "c"))}),
        ["panels.p: 'c' is no variant"],
    ),
]


@pytest.mark.parametrize(("config", "lines"), COMPARISONS)
def test_a_comparison(config, lines):
    found = comparison_problems(plain(config))
    assert len(found) == len(lines) and all(map(str.startswith, found, lines)), found


def test_every_row_of_a_comparison_is_met():
    fields = [plain(config) for config, _ in COMPARISONS]
    unmet = [row for row in COMPARISON if not any(found_by([row], f, f=f) for f in fields)]
    assert not unmet, [row.text for row in unmet]


JOBS = [
    ({"address": "a:1", "listen": "b:0"}, "address=a:1: all regions run on this machine"),
    ({"address": "a:0", "listen": "b:1"}, "listen=b:1: all regions run on this machine"),
    ({"processes": 0}, "processes=0: give the number of processes of a region, from 1"),
    ({"processes": -1}, "processes=-1: give the number of processes of a region, from 1"),
]


@pytest.mark.parametrize(("changes", "line"), JOBS)
def test_jobs_of_one_machine(changes, line):
    [found] = run_problems(asked("diloco", {**JOB, **changes}, ()), LAUNCH)
    assert found.startswith(line)
    alone = run_problems(asked("diloco", {**JOB, **changes, "regions": 1}, ()), LAUNCH)
    assert alone == ([] if "address" in changes else [found])
    assert LAUNCH[-len(PROCESSES) :] == PROCESSES


LINES = [
    ("launch --regions=0", ["--config is missing", "--regions=0: give the number of jobs"]),
    ("launch --exchange=mesh --config=diloco", ["--exchange=mesh: all regions would be in one"]),
    ("launch --restarts=-1 --config=diloco", ["--restarts=-1: give how often, from 0"]),
    ("watch a b --every=nan", ["which run? name its folder", "--every=nan: give at least 0.1 sec"]),
    ("watch a --port=-1 --once", ["--port=-1: give a port from 0", "--once prints the present st"]),
    ("watch a --network=lam", ["--network: 'lam' is unknown"]),
    ("report --step_seconds=0", ["which runs?", "--step_seconds needs", "--step_seconds=0.0: m"]),
    ("sample x --top_k=0", ["unexpected argument 'x'", "which run?", "--top_k=0: at least 1 is"]),
    ("sample --workdir=x --count=0 --length=0", ["--count=0: at least 1", "--length=0: at least"]),
    ("sample --workdir=x --temperature=nan", ["--temperature=nan: give 0 (greedy)"]),
    ("export --step=3", ["--output is missing", "--workdir is missing"]),
    (
        "export --apply=n --output=o --step=3",
        ["--onto is missing", "--step has no", "no such file"],
    ),
    ("export --workdir=x --output=/ --since=1 --dtype=float32", ["--dtype has no", "/: a folder"]),
    ("export --workdir=x --output=o --onto=y", ["--onto has no effect without --apply=PATCH"]),
    ("export --workdir=x --output=o --dtype=fp8", ["--dtype='fp8': choose float32 or bfloat16"]),
    ("bench codec --seconds=0 --repeats=0", ["--seconds=0: at least 1", "--repeats=0: at least 1"]),
    ("bench codec --size=0 --rank=0", ["--size=0: at least 1", "--rank=0: at least 1 is needed"]),
    ("bench codec --codecs=,", ["--codecs=,: name at least one"]),
    ("bench gpu --codecs=int9,int8,x", ["--codecs: 'int9' is unknown", "--codecs: 'x' is unknown"]),
    ("bench gpu --stages=,", ["--stages=,: name at least one of speed, "]),
    ("bench gpu --stages=sped", ["--stages: no 'sped'; did you mean speed?"]),
    ("bench engine --size=9 --torch", ["--size=9: use small or referen", "--torch needs PyTorch"]),
]


def test_every_row_of_flags_is_met(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    met = set()

    def noting(row):
        def wrong(line):
            found = row.wrong(line)
            met.update([row] if found else [])
            return found

        return row._replace(wrong=wrong)

    noted = {command: tuple(map(noting, rows)) for command, rows in FLAGS.items()}
    monkeypatch.setattr(refusals, "FLAGS", noted)
    for line, lines in LINES:
        assert main(line.split()) == 2
        said = capsys.readouterr().err
        assert all(part in said for part in lines), said
        assert max(1, said.count("  - ")) == len(lines), said
    unmet = [row.text for rows in FLAGS.values() for row in rows if row not in met]
    assert not unmet


def test_commands_without_a_config_do_not_wait_for_what_reads_one():
    loads = "import sys, experiments.report.main, experiments.watch.main, experiments.refusals; "
    shown = "print([x for x in ('flax', 'grain', 'orbax') if x in sys.modules])"
    told = subprocess.run([sys.executable, "-c", loads + shown], capture_output=True, text=True)
    assert told.stdout.strip() == "[]", told.stderr
