"""Collectives, memory and traffic of compiled programs, against files that say what they were.

A change shows as a diff of readable lines. To accept one, delete the file: the next run writes it
anew, and fails once.
"""

import difflib
import json
from importlib.metadata import version
from pathlib import Path

import pytest
from aot.aot_cases import of_150m, of_method

FOLDER = Path(__file__).with_name("golden")
ROUND = 0.02  # these may move by so much: the compiler's scheduling, not ours
SMALLEST = {"temporaries": 1e5, "nbytes": 1e5, "launches": 50, "exposed": 1e-5}


def described(report) -> dict:
    whole = report.as_json()
    programs = {
        name: {
            "memory": one["memory"],
            "flops": one["flops"],
            "exposed": round(one["exposed"], 9),
            "work": picked(one["work"], "nbytes", "launches"),
            "collectives": picked(one["collectives"], "count", "runs", "bytes"),
        }
        for name, one in whole["programs"].items()
    }
    kept = {k: whole[k] for k in ("target", "mesh", "resident", "announced", "crossing", "control")}
    return {
        "compilers": compilers(report.target.accelerator.platform),
        **kept,
        "programs": programs,
    }


def picked(rows: dict, *columns: str) -> dict:
    return {name: {column: row[column] for column in columns} for name, row in rows.items()}


def compilers(platform: str) -> dict[str, str]:
    """Versions of what compiled: another one lays out temporaries otherwise."""
    names = ("jax", "libtpu") if platform == "tpu" else ("jax", "jax-cuda12-plugin")
    return {name: version(name) for name in names}


def alike(now, then) -> bool:
    """Equal, but for what the compiler's scheduling decides, within `ROUND`."""
    if isinstance(then, dict) and isinstance(now, dict):
        if now.keys() != then.keys():
            return False
        return all(
            abs(now[k] - then[k]) <= ROUND * max(then[k], SMALLEST[k])
            if k in SMALLEST
            else alike(now[k], then[k])
            for k in then
        )
    return now == then


def compare(name: str, report) -> None:
    file, now = FOLDER / f"{name}.json", described(report)
    if not file.exists():
        FOLDER.mkdir(exist_ok=True)
        file.write_text(json.dumps(now, indent=1) + "\n")
        pytest.fail(f"{file.name} was not there and has been written: look at it and commit it")
    then = json.loads(file.read_text())
    if then["compilers"] != now["compilers"]:
        pytest.skip(f"{file.name}: written by {then['compilers']}, here is {now['compilers']}")
    if not alike(now, then):
        lines = [json.dumps(one, indent=1).splitlines() for one in (then, now)]
        raise AssertionError("\n".join(difflib.unified_diff(*lines, "then", "now", lineterm="")))


@pytest.mark.parametrize("method", ["diloco", "streaming_diloco", "dilocox", "noloco", "ddp"])
def test_small_programs_on_gpus(method):
    compare(f"small-h100-{method}", of_method("h100:2x4", method))


@pytest.mark.parametrize("method", ["diloco", "noloco"])
def test_small_programs_on_tpus(method):
    compare(f"small-v5e-{method}", of_method("v5e:2x2x2slices", method))


def test_150m_on_gpus():
    compare("150m-h100-diloco", of_150m("h100:2x8", 64, "auto"))
