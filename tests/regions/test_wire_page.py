"""docs/wire.md says what regions write: every record with its fields and types, and every key."""

import ast
import inspect
import pathlib
import re

import numpy as np
from regions.faults import folder, vanish
from regions.party import at_once, land, rounds, send, until

import lowcomm_jax as lc
from lowcomm_jax.store import records, secret, wire

PAGE = (pathlib.Path(lc.__file__).parent.parent / "docs" / "wire.md").read_text()
NUMBERS = ("e", "r", "i", "n", "k", "position")
PLACES = {name: r"\d+" for name in NUMBERS} | {"sha256": "[0-9a-f]{64}"}


def fields(source):
    """Records by name: (field, type, default) in their order."""
    return {
        found.name: [
            (x.target.id, ast.unparse(x.annotation), x.value and ast.unparse(x.value))
            for x in found.body
            if isinstance(x, ast.AnnAssign)
        ]
        for found in ast.parse(source).body
        if isinstance(found, ast.ClassDef)
    }


def test_every_record_stands_there_with_its_fields_types_and_defaults():
    there = fields("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    here = fields(inspect.getsource(records))
    assert there == {
        name: x for name, x in here.items() if name not in ("Record", "RunOfAnyFormat")
    }


def keys():
    """Patterns of the keys in the page's first table."""
    table = PAGE[PAGE.index("| key | what") :].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    for key in (key for cell in cells for key in re.findall("`([^`]+)`", cell)):
        parts = re.split(r"<(\w+)>", key)
        places = [PLACES.get(part, r"[^/]+") if n % 2 else re.escape(part) for n, part in
                  enumerate(parts)]  # fmt: skip
        yield key, re.compile("".join(places))


def test_every_key_that_regions_write_stands_there_and_no_other(store_party):
    regions = store_party.run(3)
    rounds(regions, 1, 3)
    regions[0].agree("stop", {"step": 4})
    regions[2].want_state()
    until(regions[0].state_transfer.owed)
    state = {"anchor/w": np.arange(7, dtype=np.float32)}, {"in_flight": []}
    regions[0].state_transfer.give(4, *state)
    vanish(regions[2])
    until(lambda: regions[0].steps().keys() == {0, 1})
    send(regions[:2], "3@x", 3, members=(0, 1))
    land(regions[:2], "3@x")
    at_once(lambda x: x.leave_result((4, *state)), regions[:1])
    run = folder(store_party) / "run"
    found = [path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()]
    patterns = dict(keys())
    unknown = [key for key in found if not any(x.fullmatch(key) for x in patterns.values())]
    assert not [key for key in unknown if not key.endswith("__lock")]
    unused = [key for key, x in patterns.items() if not any(map(x.fullmatch, found))]
    assert not unused


def test_numbers_and_names_that_the_page_gives_are_those_of_the_code():
    assert f"The format has the number {records.FORMAT}." in PAGE
    assert f"| `{wire._METADATA}`" in PAGE or f"one entry, `{wire._METADATA}`" in PAGE
    assert [name for name in wire.About.__struct_fields__ if f"`{name}`" not in PAGE] == []
    assert secret.SHORTEST == 16 and "16 bytes" in PAGE
