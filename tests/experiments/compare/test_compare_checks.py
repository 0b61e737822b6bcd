"""A comparison is checked as a whole, before any work starts."""

import re
from pathlib import Path

import pytest

from experiments.cli import RefusedError, load_config
from experiments.compare.config import comparison, variant
from experiments.compare.plan import merged, plan

SMALL = {
    "model": {"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 24},
    "data": {"seq_len": 32},
    "mesh": {"region": 1, "fsdp": 1},
}


def refused(config, workdir):
    with pytest.raises(RefusedError) as error:
        plan(config, workdir)
    return str(error.value)


def test_an_unknown_field_is_refused_with_a_near_miss():
    with pytest.raises(ValueError, match=r"comon: there is no such field; did you mean common\?"):
        comparison({"a": variant("diloco")}, "a", comon={"steps": 5}, seeds=(0,))


def test_the_comparison_that_a_page_shows_is_accepted(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "add_a_method.md").read_text(encoding="utf-8")
    [code] = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "comparison(" in block
    ]
    found = {}
    exec(code, found)
    runs = plan(found["get_config"](), tmp_path)
    assert len(runs.runs) == 6


def test_every_variants_violations_behind_its_name(tmp_path):
    holds_metrics = tmp_path / "good" / "seed5"
    holds_metrics.mkdir(parents=True)
    (holds_metrics / "metrics.jsonl").touch()
    config = comparison(
        {
            "good": variant("diloco"),
            "late": variant("streaming_diloco", method={"overlap": 40, "alpha": 1.5}),
            "odd": variant("diloco", inner={"b1": 1.0}, method={"perod": 5}),
            "longer": variant("diloco", steps=70, eval={"every": 3}),
            "lost": variant("no_such_file"),
        },
        "good",
        seeds=(3, 5),
        common={**SMALL, "steps": 60},
    )
    text = refused(config, tmp_path)
    for part in (
        "good: --workdir=",
        "late: method.overlap=40",
        "late: method.alpha=1.5",
        "odd: inner.b1=1.0",
        "odd: method.perod=5",
        "lost: --config=no_such_file",
        "eval.every differs between variants (100: good; 3: longer)",
        "tokens differs between variants (30720: good; 35840: longer)",
    ):
        assert part in text, part


def test_runs_are_whole_configs_by_seed_then_variant(tmp_path):
    changes = {"method": {"taylor": {"mode": "norm", "strength": 0.2}, "fragments": 2}}
    config = comparison(
        {"b": variant("cocodc", **changes), "a": variant("diloco", inner={"b2": 0.97})},
        "b",
        seeds=(4, 2),
        common={**SMALL, "steps": 60},
    )
    found = plan(config, tmp_path)
    assert [(r.variant, r.seed) for r in found.runs] == [("a", 4), ("b", 4), ("a", 2), ("b", 2)]
    assert [r.fields["seed"] for r in found.runs] == [4, 4, 2, 2]
    assert found.runs[2].workdir == tmp_path / "a" / "seed2"
    a, b = found.runs[0].fields, found.runs[1].fields
    assert b["method"]["taylor"] == {"mode": "norm", "strength": 0.2}
    assert b["method"]["period"] == 30 and b["model"]["width"] == a["model"]["width"] == 16
    assert (a["inner"]["b2"], b["inner"]["b2"]) == (0.97, 0.95)
    assert found.panels[0]["variants"] == ("a", "b") and found.panels[0]["baseline"] == "b"


def test_sections_merge_unless_they_name_another_rule():
    config = {"outer": {"name": "nesterov", "momentum": 0.9}, "seed": 1, "data": {"a": 1, "b": 2}}
    changes = {"outer": {"name": "sgd"}, "data": {"b": 3}}
    assert merged(config, changes) == {
        "outer": {"name": "sgd"},
        "seed": 1,
        "data": {"a": 1, "b": 3},
    }
    assert merged(config, {"outer": {"momentum": 0.3}})["outer"]["name"] == "nesterov"


CLAIMS = [p.stem for p in Path("configs/paper").glob("*.py") if "def get_config" in p.read_text()]


@pytest.mark.parametrize(
    "name, size",
    [
        ("compare/cocodc_outer_lr", "gpu"),
        ("compare/codec_quality", "nano"),
        pytest.param("compare/cocodc_vs_streaming", "small", marks=pytest.mark.slow),
        pytest.param("compare/noloco_vs_diloco", "small", marks=pytest.mark.slow),
        *(
            pytest.param(f"paper/{name}", size, marks=pytest.mark.slow)
            for name in sorted(CLAIMS)
            for size in ("small", "full")
        ),
    ],
)
def test_the_studies_pass_their_checks(name, size, tmp_path):
    config, problems = load_config(f"configs/{name}.py", [("size", size)])
    assert not problems
    with config.unlocked():
        # Nothing is fetched in a test, and the virtual devices are not the machine's.
        config.sizes[size].common.data = {"corpus": "python"}
        config.sizes[size].common.mesh = {"region": 1, "fsdp": 1}
    found = plan(config, tmp_path)
    used = {v for p in found.panels for v in p["variants"]}
    assert used == set(found.variants)
    # All of one comparison in one piece, whatever stages a method's own config has.
    assert {run.fields["mesh"]["stage"] for run in found.runs} == {1}


def test_an_unknown_size_names_the_known_ones(tmp_path):
    config, problems = load_config("configs/compare/cocodc_outer_lr.py", [("size", "smal")])
    assert not problems and "did you mean small" in refused(config, tmp_path)
