"""The comparison of two revisions reports whatever differs."""

import numpy as np
import pytest
import same_as
import same_as_cases

import lowcomm_jax as lc

LATER = {"losses": np.array([1.0, 2.0]), "finished anchor a": np.array([[3.0]], np.float32)}
FOUND = {
    "first events": np.array('[{"kind": "send"}]'),
    "first bytes sent": np.array(12),
    **{f"{part} {name}": value for part in ("later", "restored") for name, value in LATER.items()},
    "clock report, floats": np.array([0.5, 4.0]),
    "compiled steady": np.array(0),
}
METHODS = list(lc.methods.NAMES)
OTHER = {"U": np.array('[{"kind": "land"}]'), "i": np.array(13), "f": np.array([1.0, 2.5])}


def test_equal_results_are_the_same():
    assert same_as.differences(FOUND, {k: v.copy() for k, v in FOUND.items()}) == []


@pytest.mark.parametrize("name", FOUND)
def test_every_field_counts(name):
    changed = {**FOUND, name: OTHER[FOUND[name].dtype.kind]}
    less = {k: v for k, v in FOUND.items() if k != name}
    assert [found.startswith(f"{name} ") for found in same_as.differences(FOUND, changed)] == [True]
    assert same_as.differences(FOUND, less) == [f"{name} only with BASE"]


def test_a_difference_is_told():
    ends = {"later losses": np.array([1.0, 2.5]), "restored losses": np.array([1.0, 2.5])}
    assert same_as.differences(FOUND, {**FOUND, **ends}) == [
        "later losses by 2.5e-01",
        "restored losses by 2.5e-01",
    ]
    for name, other, told in (
        ("compiled steady", np.array(3), "0 -> 3"),
        ("later losses", np.array([1, 2]), "float64(2,) -> int64(2,)"),
        ("first events", np.array('[{"kind": "land"}]'), '...[{"kind": "send"}]... -> '),
    ):
        (found,) = same_as.differences(FOUND, {**FOUND, name: other})
        assert found.startswith(f"{name} {told}")


def test_a_restored_run_must_go_on_as_the_saved_one_did():
    wrong = {**FOUND, "restored losses": np.array([1.0, 2.5])}
    assert same_as.differences(wrong, wrong) == ["restored losses by 2.5e-01"]


def test_failing_alike_is_not_the_same():
    failed = {"error": np.array("ValueError: no")}
    assert len(same_as.differences(failed, failed)) == 2
    assert same_as.differences(FOUND, failed) == ["fails with the working tree: ValueError: no"]
    assert same_as.differences(None, FOUND) == ["did not run with BASE"]


def test_another_momentum_is_seen(tmp_path, capsys):
    """The whole tool, with two copies of this tree of which one differs in one digit."""
    for side in same_as.SIDES:
        same_as.copy(tmp_path / f"{side}_tree")
    rules = tmp_path / "head_tree" / "lowcomm_jax" / "rules" / "outer.py"
    changed = "nesterov = lambda rate=0.7, momentum=0.9: published(rate, momentum + 0.01)"
    rules.write_text(f"{rules.read_text()}\npublished = nesterov\n{changed}\n")
    assert same_as.compare(tmp_path, "^weights$") == 1
    said = capsys.readouterr().out
    assert "first anchor a by " in said and "1 differ: weights" in said
    assert "losses" in said and "events," in said and "compiled" not in said.split("\n")[0]


def test_every_method_has_a_case_on_each_mesh():
    made = same_as_cases.cases()
    for where in ("", "eight devices, ", "fsdp x tensor, "):
        missing = {name for name in METHODS if f"{where}{name}" not in made}
        assert missing == ({"snoo"} if where else set())  # it has one region
