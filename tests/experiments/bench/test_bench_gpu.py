"""`bench gpu` on this machine's processor: all of it runs, and says what it cannot know."""

import dataclasses
import json
import time

import jax
import pytest
from aot.aot_cases import needs

from experiments import progress
from experiments.bench import codec, gpu, main
from experiments.bench.work import interleave
from experiments.cli import RefusedError
from lowcomm_jax.models import build, preset

TINY = gpu.Case("nano", 1, 8, changes=(("layers", 1), ("layer_loop", "unrolled")))
PLAN = gpu.Plan(
    speed=(TINY,),
    regions=(TINY,),
    levers=(gpu.Lever("remat=full", model=(("remat", "full"),)),),
    codecs=("bf16",),
    codec_size=64,
    exchange=TINY,
)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """The command takes its share of a card's memory by the environment, which other tests have."""
    monkeypatch.setenv(gpu.MEMORY[0], "0.5")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Runs the command on a tiny plan: (exit code, its file)."""

    def run(*flags, **changes):
        monkeypatch.setattr(gpu, "ON_PROCESSORS", dataclasses.replace(PLAN, **changes))
        file = tmp_path / "gpu.json"
        code = main.main(["gpu", "--repeats=1", f"--json={file}", *flags])
        return code, json.loads(file.read_text())

    return run


def test_a_small_case_is_measured_profiled_and_written(measured, capsys):
    code, found = measured("--stages=speed,profile,attention")
    assert code == 0
    speed, *profile = found["rows"]
    assert speed["tokens_per_step"] == 8 and speed["tokens_per_second"] > 0
    # Parameters, two moments and an anchor at least, fp32.
    assert speed["memory_foretold"] > 4 * 4 * 280_000
    assert speed["mfu"] is None and speed["bound_seconds"] is None
    by_kind = {row["kind"]: row for row in profile}
    assert set(by_kind) == {"product", "other"}
    # The backward pass has twice the products of the forward pass; a loss has few of its own.
    model = preset(TINY.preset, **dict(TINY.changes))
    assert by_kind["product"]["flops"] == pytest.approx(8 * build(model).flops_per_token(8), 0.1)
    assert all(row["seconds"] > 0 and row["of_peak"] is None for row in profile)
    assert found["left_out"] == {"attention: gradients": "this device has no kernel for attention"}
    assert "this device has no kernel for attention" in capsys.readouterr().out


@pytest.mark.slow
def test_every_stage_has_its_rows(measured):
    code, found = measured()
    assert code == 0 and not found["failed"]
    rows = {stage: [r for r in found["rows"] if r["stage"] == stage] for stage in gpu.STAGES}
    one, four = rows["regions"]
    assert one["of_one_region"] == 1 and (one["regions"], four["regions"]) == (1, 4)
    assert [r["lever"] for r in rows["levers"]] == ["as it is", "small, as it is", "remat=full"]
    assert rows["levers"][2]["flops"] > rows["levers"][0]["flops"]
    (codec,) = rows["codecs"]
    assert codec["encode_rate"] == pytest.approx(4 * 64**2 / codec["encode_s"])
    (exchange,) = rows["exchange"]
    assert 0 <= exchange["beside_work_seconds"] <= exchange["exchange_seconds"] > 0


def test_what_fails_is_named_and_the_rest_goes_on(measured, capsys):
    code, found = measured("--stages=codecs", codecs=("bf15", "bf16"))
    assert code == 1
    assert "did you mean" in found["failed"]["codecs: bf15"]
    assert [row["codec"] for row in found["rows"]] == ["bf16"]
    assert "codecs: bf15: " in capsys.readouterr().out


def test_codecs_are_named_by_a_flag(measured):
    code, found = measured("--stages=codecs", "--codecs=int8,own_parts:SIGNS")
    assert code == 0
    assert [row["codec"] for row in found["rows"]] == ["int8", "own_parts:SIGNS"]
    assert found["rows"][1]["bytes_per_value"] == 1 + 4 / 64


def test_what_would_not_end_in_time_is_left_out(measured, monkeypatch):
    figures = ("bytes_per_value", "encode_s", "decode_s", "copy_s")

    def slow(name, *_):
        time.sleep(0.6)  # of one second
        return {"codec": name, **dict.fromkeys(figures, 1.0)}

    monkeypatch.setattr(codec, "measure", slow)
    stages = "--stages=codecs,attention"
    code, found = measured(stages, "--seconds=1", codecs=("bf16", "fp16", "int8"))
    assert code == 0 and [row["codec"] for row in found["rows"]] == ["bf16"]
    late = {f"codecs: {name}": "not reached in 1 s" for name in ("fp16", "int8")}
    # What comes first in its stage is taken to last as long as others.
    assert found["left_out"] == late | {"attention: gradients": "not reached in 1 s"}


def test_levers_on_cards_are_of_the_model():
    for lever in gpu.ON_CARDS.levers:
        base = gpu.ON_CARDS.speed[0]
        case = dataclasses.replace(base, **dict(lever.case)).but(**dict(lever.model))
        model = preset(case.preset, **dict(case.changes))  # refuses what no model has
        assert {name: getattr(model, name) for name, _ in lever.model} == dict(lever.model)


def test_the_compiler_of_gpus_knows_the_levers():
    where = jax.sharding.SingleDeviceSharding(needs("h100:1x1").devices[0])
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=where)
    lowered = jax.jit(lambda x: x + 1).lower(x)
    for lever in gpu.ON_CARDS.levers:
        # It refuses an option that it does not know.
        assert "add" in lowered.compile(dict(lever.options) or None).as_text(), lever.name


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--repeats=0", "at least 1 is needed"),
        ("--seconds=0", "at least 1 is needed"),
        ("--stages=lever", "did you mean levers"),
        ("--codecs=bf16,int5", "--codecs: 'int5' is unknown"),
        ("--json=/nowhere/gpu.json", "choose another file"),
    ],
)
def test_what_cannot_work_is_refused(flag, why):
    with pytest.raises(RefusedError, match=why):
        main.main(["gpu", flag])


def test_rounds_are_interleaved_and_told(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
    calls = []
    variants = {"one": lambda: calls.append("one"), "two": lambda: calls.append("two")}
    seconds = interleave(variants, repeats=2)
    assert calls == ["one", "two"] * 3 and {k: len(v) for k, v in seconds.items()} == {
        "one": 2,
        "two": 2,
    }
    told = capsys.readouterr()
    assert told.err.splitlines()[-1].startswith("timed: 5/6  ") and not told.out
