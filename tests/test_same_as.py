"""The comparison of two revisions reports whatever differs."""

import copy

import pytest
import same_as

FOUND = {
    "first": {"losses": "a1", "bytes sent": 12, "anchor": "b2"},
    "later": {"losses": "c3", "finished anchor": "d4"},
    "restored": {"losses": "c3", "finished anchor": "d4"},
    "clock": {"report": "e5"},
    "compiled": {"first": 9, "steady": 0},
}
FIELDS = [(part, name) for part, values in FOUND.items() for name in values]


def test_equal_results_are_the_same():
    assert same_as.differences(FOUND, copy.deepcopy(FOUND)) == []


@pytest.mark.parametrize(("part", "name"), FIELDS)
def test_every_field_counts(part, name):
    changed, less = copy.deepcopy(FOUND), copy.deepcopy(FOUND)
    changed[part][name] = "other"
    del less[part][name]
    assert [f"{part} {name} " in found for found in same_as.differences(FOUND, changed)] == [True]
    assert [f"{part} {name} " in found for found in same_as.differences(FOUND, less)] == [True]
    assert any(f"{part} {name} " in found for found in same_as.differences(less, FOUND)) == (
        part != "restored"  # which is held against what followed in BASE's own run
    )


def test_a_restored_run_must_go_on_as_the_saved_one_did():
    wrong = copy.deepcopy(FOUND)
    wrong["restored"]["losses"] = "other"
    assert same_as.differences(wrong, wrong) == ["restored losses c3 -> other"]


def test_failing_alike_is_not_the_same():
    failed = {"error": {"type": "ValueError", "message": "no"}}
    assert len(same_as.differences(failed, failed)) == 2
    assert same_as.differences(FOUND, failed) == ["fails with the working tree: ValueError: no"]
    assert same_as.differences(None, FOUND) == ["did not run with BASE"]
