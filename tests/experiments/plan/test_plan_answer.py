"""The short answer of a plan: its screen, arithmetic and commands, and runs held against it."""

import dataclasses
import importlib
import io
import json
import re

import jax
import made_runs
import numpy as np
import pytest
from rich.console import Console

import lowcomm_jax as lc
from experiments.__main__ import main as command
from experiments.cli import RefusedError, load_config
from experiments.config import plain
from experiments.plan import main as plan_command
from experiments.plan import start
from experiments.plan.config import read
from experiments.plan.screen import show_answer
from experiments.report.against import against, planned_row, read_plan
from experiments.report.runlog import RunLog, read_run
from experiments.train.methods import make_method
from experiments.train.resolve import resolve
from lowcomm_jax.planner import methods as plan_methods

LLAMAS = ("llama_7b", "llama_8b", "llama_70b")


@pytest.fixture(autouse=True, scope="module")
def the_answer_alone():
    """It shows nothing of the search for settings and of the picture, which take longest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_command, "search", lambda work, bound_nats, progress: (None, [], 0))
        patch.setattr(plan_command, "picture", lambda *given: None)
        yield


def config(name="template", **changes):
    found = importlib.import_module(f"configs.plan.{name}").get_config().to_dict()
    return {**found, **changes}


def answered(fields, folder, width=100, **shown):
    text = io.StringIO()
    result = plan_command.planned(fields, folder, Console(file=text, width=width), **shown)
    return result, text.getvalue()


def small(methods, **changes):
    """A model, steps and batches that a test can train."""
    fields = {
        "name": "small",
        "model": "nano",
        "network": "us_4_regions",
        "compute_s": 0.02,
        "tokens": 8.0 * 4 * 2 * 32,
        "tokens_per_step": 4.0 * 2 * 32,
        "seq_len": 32,
        "mesh": {},
        "methods": methods,
    }
    return fields | changes


@pytest.mark.parametrize("name", LLAMAS)
def test_the_presets_answer_in_a_screen(name, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(plan_command, "show_answer", lambda *given: shown.append(given))
    result, _ = answered(config(name), tmp_path)
    found, ((_, rows, _),) = result["answer"], shown
    assert len(found["best"]) == 3 and found["device_gb"] == 80.0
    for width in (80, 120):
        stream = io.StringIO()
        show_answer(result, rows, Console(file=stream, width=width))
        text = stream.getvalue()
        assert len(text.splitlines()) <= 24 and "…" not in text
        assert result["scenario"] in " ".join(text.split())
        for place, best in enumerate(found["best"], 1):
            command_line = f"python -m experiments train --config={tmp_path}/{best}.py"
            assert f"{place}. {best}: {command_line}" in text
        assert result["rows"][0]["method"]["name"] in text and "estimate" in text
    for best in found["best"]:
        started, problems = load_config(str(tmp_path / f"{best}.py"), [])
        assert not problems and started.model.preset == name and started.regions == 4
        assert started.model.vocab_size == {"llama_7b": 32_000}.get(name, 128_256)
        per_step = started.batch * started.regions * started.data.seq_len
        assert per_step == result["tokens_per_step"]


def test_a_model_and_a_network_may_be_mappings(tmp_path):
    model = (
        "layers: 8, width: 64, mlp_width: 256, heads: 2, kv_heads: 2, head_dim: 32, vocab_size: 99"
    )
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from configs.plan import llama_8b\n\n\ndef get_config():\n"
        "    config = llama_8b.get_config()\n"
        "    config.network = {'regions': ['a', 'b'], 'bandwidth_gbps': 3}\n    return config\n"
    )
    given, problems = load_config(str(mine), [("model", f"{{{model}}}")])
    setup = read(plain(given))
    assert not problems and setup.model.shapes.layers == 8 and setup.model.shapes.width == 64
    assert setup.work.network.regions == ("a", "b") and setup.work.network.slowest_gbps == 3
    typed = '{"regions": 3, "bandwidth_gbps": 2}'
    given, problems = load_config("configs/plan/llama_8b.py", [("network", typed)])
    assert not problems and read(plain(given)).work.network.slowest_gbps == 2
    _, problems = load_config("configs/plan/llama_8b.py", [("network", "{regions: [a")])
    assert len(problems) == 1 and "no mapping" in problems[0] and "\n" not in problems[0]


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Result and text of the plan of 8B, explained."""
    fields = config("llama_8b", price_per_gpu_hour=3.0, price_per_gb=0.5)
    return answered(fields, tmp_path_factory.mktemp("eight"), explain=True)


def test_price_by_hand(eight):
    result, _ = eight
    for row in result["rows"]:
        entry = result["answer"]["rows"][row["method"]["name"]]
        gpu = row["hours"] * 4 * 64 * 3.0
        traffic = 4 * row["sent_bytes_total"] / 1e9 * 0.5
        assert entry["price"] == pytest.approx(
            {"gpu": gpu, "traffic": traffic, "total": gpu + traffic}
        )
        held = row["memory"]["state_total"] + row["memory"]["estimate_total"]
        assert entry["gb"] == held / 1e9 and entry["above"] is (held > 80e9)


def test_fewer_devices_hold_more_of_the_state(tmp_path):
    fields = config("llama_8b", mesh={"fsdp": 2}, device_gb=40.0)
    tight = {**fields, "methods": {"streaming": fields["methods"]["streaming"]}}
    result, text = answered(tight, tmp_path)
    entry = result["answer"]["rows"]["streaming"]
    assert entry["above"] and f"mesh.fsdp={entry['below_with']} brings it below" in text
    assert "fits" not in text and "not fit" not in text  # it is an estimate
    for fsdp, above in ((entry["below_with"], False), (entry["below_with"] // 2, True)):
        again, _ = answered({**tight, "mesh": {"fsdp": fsdp}}, tmp_path)
        assert again["answer"]["rows"]["streaming"]["above"] is above


def test_what_is_not_known_is_asked_for(tmp_path):
    unknown = {"device_gb": None, "price_per_gpu_hour": None, "price_per_gb": None}
    methods = {"diloco": {"preset": "diloco"}}
    result, text = answered(config("llama_8b", methods=methods, **unknown), tmp_path)
    assert result["answer"]["rows"]["diloco"]["price"] is None
    assert "give --config.device_gb" in text and "give --config.price_per_gpu_hour" in text


def test_the_frontier_is_of_cost_against_published_loss(tmp_path):
    """Over 1 Gbit/s 107B is first the fastest at +0.26 nats, and last 161 days without a loss."""
    result, text = answered(config("dilocox_107b"), tmp_path)
    frontier = ["dilocox", "without_overlap", "without_compression", "allreduce"]
    assert result["answer"]["frontier"] == result["answer"]["order"] == frontier
    assert result["answer"]["best"] == frontier[:3] and "frontier: dilocox, " in text
    rows = {row["method"]["name"]: row for row in result["rows"]}
    hours = [rows[name]["hours"] for name in frontier]
    nats = [rows[name]["penalty_nats"] for name in frontier]
    assert hours == sorted(hours) and nats == sorted(nats, reverse=True) and nats[-1] == 0
    assert hours[0] == pytest.approx(9.77, abs=0.01) and nats[0] == pytest.approx(0.264, abs=1e-3)


def test_rows_that_another_one_beats_come_behind_the_frontier(eight):
    result, _ = eight
    rows, answer = {row["method"]["name"]: row for row in result["rows"]}, result["answer"]
    total = {name: entry["price"]["total"] for name, entry in answer["rows"].items()}
    for name in answer["order"]:
        nats = rows[name]["penalty_nats"]
        beaten = nats is None or any(
            other != name
            and rows[other]["penalty_nats"] is not None
            and rows[other]["penalty_nats"] <= nats
            and total[other] < 1.005 * total[name]
            for other in rows
        )
        assert beaten or name in answer["frontier"], name
    unknown = [name for name in answer["order"] if rows[name]["penalty_nats"] is None]
    assert unknown and answer["order"][-len(unknown) :] == unknown


def assert_hours_are_the_product_beside_them(text):
    line = next(line for line in text.splitlines() if "of the time computing" in line)
    found = re.search(r": ([\d.,]+) h = ([\d.,]+) steps x ([\d.]+) s / ([\d.]+)% of", line)
    hours, steps, seconds, percent = (float(word.replace(",", "")) for word in found.groups())
    product = steps * seconds / (percent / 100) / 3600
    assert f"{product:.4g}" == f"{hours:.4g}", line


def test_explain_names_what_drives_it(eight, tmp_path):
    _, text = eight
    assert "the devices drive it" in text and "GPU hours are" in text
    assert_hours_are_the_product_beside_them(text)
    slow = config("llama_8b", network="consumer_1gbps", methods={"diloco": {"preset": "diloco"}})
    _, text = answered(slow, tmp_path, explain=True)
    assert "the links drive it" in text
    assert_hours_are_the_product_beside_them(text)
    fields = small({"allreduce": {"preset": "allreduce"}}, network="intercontinental")
    _, text = answered(fields, tmp_path, explain=True)
    assert "the delays drive it" in text
    halved, _ = answered({**fields, "tokens": fields["tokens"] / 2}, tmp_path)
    line = next(line for line in text.splitlines() if "half the tokens" in line)
    assert f"{halved['rows'][0]['hours']:,.4g}" in line and "-50.0%" in line


def test_explain_says_what_an_object_store_is_asked(eight):
    """Rounds x 18 requests, and 17 a second, between four regions (`tests/regions`: measured)."""
    result, text = eight
    best = result["answer"]["best"][0]
    row = next(row for row in result["rows"] if row["method"]["name"] == best)
    rounds = result["steps"] / row["method"]["period"] * row["method"]["fragments"]
    regions = len(result["network"]["regions"])
    requests = (3 * (regions - 1) + 9) * rounds + 3600 * row["hours"] * (4 * regions + 1)
    (line,) = [line for line in text.splitlines() if line.startswith("store: ")]
    assert line.endswith(f": {requests / 1e6:.3g}M a region")


def test_the_command_takes_the_switches(tmp_path, capsys):
    given = ["--config=configs/plan/llama_8b.py", f"--workdir={tmp_path}"]
    assert command(["plan", *given, "--explain"]) == 0
    assert "drive it" in capsys.readouterr().out
    assert command(["plan", *given, "--config.device_gb=-1.0", "--config.price_per_gb=-2.0"]) == 2
    said = capsys.readouterr().err
    assert "device_gb" in said and "price_per_gb" in said


# Alias; fragments; a period late; speeds and groups; no period; fragments left out; own codec.
QUICK = ("allreduce", "streaming_diloco", "dilocox", "halos", "sparta", "decoupled_diloco", "demo")


@pytest.mark.parametrize(
    "preset",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(plan_methods.FACTORIES)
    ],
)
def test_every_preset_starts_a_run(preset, tmp_path):
    row = {"preset": preset, "stalls": True}
    if plan_methods.planned(preset).fragments > 1:
        row["fragments"] = 2  # of the model's four layers
    fields = small({"mine": row}, tokens=4e6)
    result, _ = answered(fields, tmp_path)
    entry = result["answer"]["rows"]["mine"]
    assert entry["train"] is not None, entry["no_train"]
    started, _ = load_config(str(tmp_path / "mine.py"), [("mesh.region", "1"), ("mesh.fsdp", "1")])
    with jax.numpy_dtype_promotion("standard"):  # what users run
        job = resolve(started, tmp_path / "run")
    method = read(fields).methods[0]
    assert job.tokens_per_step == fields["tokens_per_step"]
    section = job.config["method"]
    ticks = section["seconds"] / section["step_seconds"] if "seconds" in section else 1
    assert (section.get("period") or ticks) == method.period
    assert section.get("fragments", 1) == method.fragments
    # A run of it is known by its plan again, as both stand in their files.
    written = json.loads(json.dumps({"config": plain(started)}))
    run = RunLog("run", written, [], [], [], np.array([]), None)
    assert planned_row(run, read_plan(tmp_path))["method"]["name"] == "mine"


def test_a_method_of_ones_own_is_planned(tmp_path):
    rows = {
        "mine": {"preset": "lowcomm_jax.methods:diloco", "period": 20},
        "diloco": {"preset": "diloco"},
    }
    result, text = answered(small(rows), tmp_path)
    sent = {row["method"]["name"]: row["sent_bytes_total"] for row in result["rows"]}
    assert sent["mine"] == pytest.approx(5 * sent["diloco"], rel=1e-6)
    assert "lowcomm_jax.methods:diloco is a method of your own" in text


def test_rules_that_a_row_names_are_planned_and_trained(tmp_path):
    """Also one that the factory does not take; a figure of the paper's own rules does not hold."""
    streaming = {"preset": "streaming_diloco", "overlap": 2, "fragments": 2}
    sgd = {"name": "lowcomm_jax.rules.outer:sgd", "learning_rate": 0.5}
    rows = {
        "plain": streaming,
        "other": streaming | {"outer": "average", "merge": None},
        "none": streaming | {"outer": None},
        "mine": streaming | {"outer": sgd, "landing": "replace"},
    }
    result, _ = answered(small(rows), tmp_path)
    found = {row["method"]["name"]: row for row in result["rows"]}
    assert found["plain"]["penalty_nats"] == found["none"]["penalty_nats"] is not None
    assert found["other"]["penalty_nats"] is found["mine"]["penalty_nats"] is None
    assert found["mine"]["sent_bytes_total"] == found["plain"]["sent_bytes_total"]
    methods = {}
    for name in ("other", "mine"):
        started, _ = load_config(str(tmp_path / f"{name}.py"), [])
        methods[name], problems = make_method(plain(started.method))
        assert not problems
    assert methods["other"].outer.init({}) == lc.outer.average().init({})
    assert methods["mine"].landing.init({}) == lc.landing.replace().init({})
    rows["mine"]["landing"], rows["other"]["merge"] = "replaced", "isotropi"
    rows["none"]["schedule"] = 5
    unknown = (
        r"other: method.merge.name='isotropi' is unknown; did you mean isotropic[^-]*- [^-]*"
        r"none: method.schedule is a int, which no config.json holds[^-]*- [^-]*"
        "mine: method.landing.name='replaced' is unknown; did you mean replace"
    )
    with pytest.raises(ValueError, match=unknown):
        answered(small(rows), tmp_path)


def test_a_model_of_changed_fields_is_trained_with_them(tmp_path):
    model = {"preset": "scaling_35m", "layers": 2}
    result, text = answered(small({"d": {"preset": "diloco"}}, model=model), tmp_path)
    train = result["answer"]["rows"]["d"]["train"]
    assert (train["model.preset"], train["model.layers"]) == ("scaling_35m", 2)
    assert "no command, " not in text


def test_tokens_that_do_not_divide_name_the_nearest_that_do(tmp_path):
    fields = small({"diloco": {"preset": "diloco"}}, tokens_per_step=300.0)
    result, _ = answered(fields, tmp_path)
    said = result["answer"]["rows"]["diloco"]["no_train"]
    assert said.endswith("4 regions and seq_len 32: give --config.tokens_per_step=256"), said
    result, _ = answered({**fields, "tokens_per_step": 256.0}, tmp_path)
    assert result["answer"]["rows"]["diloco"]["train"] is not None


# -- a run held against its plan -----------------------------------------------------------------

PERIOD, R = 4, 4


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    methods = {"diloco": {"preset": "diloco", "period": PERIOD}}
    result, _ = answered(small(methods), folder)
    return folder, result


def ran(folder, result, **changes):
    """A run of exactly what was planned; `changes` of its config."""
    started, _ = load_config(str(folder / "diloco.py"), [])
    row, rows, sent = result["rows"][0], [], 0
    nbytes = round(row["payload_bytes"])
    for t in range(1, 11):
        events = []
        if t % PERIOD == 0:
            sent += round(row["sent_bytes_per_period"])
            for kind in ("send", "land"):
                events.append(made_runs.event(kind, t, R, nbytes=nbytes * (kind == "send")))
        fields = {"tokens": 256 * t, "bytes_sent": [sent] * R, "tokens_per_second": 512.0}
        rows.append(made_runs.step(t, R, events=events, **fields))
    header = made_runs.header(
        R,
        config=plain(started) | changes,
        steps=10,
        params=result["params"],
        trained_params=result["params"],
        tokens_per_step=256,
        allreduce_bytes_per_step=6 * result["params"],
        fragment_bytes=[nbytes],
    )
    return RunLog("mine", header, rows, [], [], np.array([]), None)


def test_a_run_as_planned(planned):
    folder, _ = planned
    lines = {line.what: line for line in against(ran(*planned), read_plan(folder))}
    for what in ("parameters", "tokens a step", "payload of the model", "staleness, inner steps"):
        assert lines[what].ratio == pytest.approx(1.0, rel=1e-6), what
    assert lines["sent a step, per region"].ratio == pytest.approx(1.0, rel=1e-6)
    assert not [line for line in lines.values() if line.apart]
    # On this machine a step took half a second: said, and no difference from the plan.
    machine = lines["a step on the run's machine"]
    assert machine.seen == 0.5 and machine.ratio > 10 and not machine.apart


def test_what_is_apart_is_said_and_stands_on_the_page(planned, capsys, monkeypatch, tmp_path):
    folder, _ = planned
    run = ran(*planned)
    for step in run.steps:
        step["bytes_sent"] = [2 * sent for sent in step["bytes_sent"]]
        step |= {"loss": [3.0] * R, "loss_mean": 3.0, "disagreement": None}
    apart = [line.what for line in against(run, read_plan(folder)) if line.apart]
    assert apart == ["sent a step, per region"]
    run.header.update(here=list(range(R)), data={"corpus": "made up"})
    monkeypatch.setattr("experiments.report.main.read_run", lambda workdir: run)
    page = tmp_path / "page.html"
    given = [str(tmp_path / "mine"), f"--png={tmp_path / 'a.png'}", f"--html={page}"]
    assert command(["report", *given, f"--against={folder}"]) == 0
    assert "2.000 differs" in capsys.readouterr().out
    text = page.read_text()
    for part in ("against its plan", "sent a step, per region", ">2.000 differs<", "more than 10%"):
        assert part in text, part
    assert command(["report", *given]) == 0
    assert "against its plan" not in page.read_text()


def test_a_run_of_another_config_is_refused_before_anything_is_printed(
    planned, capsys, monkeypatch, tmp_path
):
    folder, result = planned
    assert command(["report", str(folder), f"--against={tmp_path / 'none.json'}"]) == 2
    assert "No such file" in capsys.readouterr().err
    other = ran(*planned, regions=3, batch=8)
    monkeypatch.setattr("experiments.report.main.read_run", lambda workdir: other)
    assert command(["report", "anywhere", f"--against={folder}"]) == 2
    said = capsys.readouterr()
    assert not said.out and "of diloco there and here differ" in said.err
    assert "regions: 4 -> 3" in said.err and "batch: 2 -> 8" in said.err
    short = ran(*planned)
    with pytest.raises(RefusedError, match="a period is 4"):
        against(dataclasses.replace(short, steps=short.steps[:3]), result)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diloco", "streaming"])
def test_a_real_run_is_as_planned(name, root, tmp_path):
    methods = {
        "diloco": {"preset": "diloco", "period": PERIOD},
        "streaming": {"preset": "streaming_diloco", "period": 8, "fragments": 2, "overlap": 2},
    }
    answered(small(methods, tokens=16.0 * 4 * 2 * 32), tmp_path)
    given = [
        f"--config={tmp_path / name}.py",
        f"--config.data.corpus=text:{root / 'texts'}",
        f"--config.data.cache_dir={root / 'cache'}",
        "--config.data.val_fraction=0.3",
        "--config.inner.warmup_steps=2",
        "--config.eval.sequences=20",
        "--config.mesh.region=1",
        f"--workdir={tmp_path / 'run'}",
        "--compile_cache=off",
        "--quiet",
    ]
    with jax.numpy_dtype_promotion("standard"):  # what users run
        assert command(["train", *given]) == 0
    lines = {line.what: line for line in against(read_run(tmp_path / "run"), read_plan(tmp_path))}
    assert lines["parameters"].ratio == pytest.approx(1.0, abs=0.01)  # bytes need 258 entries
    assert lines["staleness, inner steps"].ratio == 1.0
    for what in ("payload of the model", "sent a step, per region", "a step on the network"):
        assert lines[what].ratio == pytest.approx(1.0, abs=0.1), what


def test_a_run_can_start_of_a_method_without_a_config_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "has_config", lambda name: False)
    row = {"preset": "streaming_diloco", "fragments": 2, "stalls": True}
    answered(small({"mine": row}, tokens=4e6), tmp_path)
    assert "from configs" not in (tmp_path / "mine.py").read_text()
    started, problems = load_config(str(tmp_path / "mine.py"), [])
    with jax.numpy_dtype_promotion("standard"):  # what users run
        assert problems == [] and resolve(started, tmp_path / "run")
    method, found = make_method(plain(started)["method"])
    assert found == [] and method.schedule.fragments == 2
    assert (method.codec.name, method.schedule.period) == ("e3m0", 100)
