"""`python tests/check_types.py`: the types that the public names promise are there, and true.

Three questions for the type checker, in half a minute on one core; exits with 1, one line a fault:

- Does every public name (`public_names.txt`, with the methods and attributes of its classes) say
  what it takes and gives? (`--verifytypes`, which reads the package as its users' checkers do)
- Do bodies return what their signatures say? In the whole package. (`[tool.basedpyright]` in
  pyproject.toml)
- Do typical uses (`typed_uses.py`) come out as what they are in a run? `test_types.py` runs them.

Not a fault: a name whose own types are told in terms of an internal class that has parts without
annotations (`SyncLoop`), and `jax.Device`, of which JAX itself tells a checker nothing.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from test_public_names import offered_names

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lowcomm_jax"
# Messages about an annotation itself; others tell of parts of the class that it names.
OWN = ("annotation", "has unknown type", "is unknown", "Type unknown")
# Their devices: `jax.Device` is a variable to a checker.
OF_DEVICES = (
    f"{PACKAGE}.make_mesh",
    f"{PACKAGE}.mesh.regions.make_mesh",
    f"{PACKAGE}.models.build",
    f"{PACKAGE}.models.model.build",
)


def checker(*arguments: str) -> dict[str, Any]:
    """What basedpyright answers.

    Raises:
      SystemExit: it is not here, or answers nothing.
    """
    command = [sys.executable, "-m", "basedpyright", "--outputjson", *arguments]
    # The checker asks this Python for its path: an editable install may stand there as code alone.
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True)
    if not done.stdout.strip():
        raise SystemExit(f"no types were checked: {done.stderr.strip()}")
    return json.loads(done.stdout)


def faults_in_bodies(answer: dict[str, Any]) -> list[str]:
    """`file:line: what is wrong` of an ordinary run."""
    return [
        f"{Path(one['file']).relative_to(ROOT)}:{one['range']['start']['line'] + 1}: "
        f"{_line(one['message'])}"
        for one in answer["generalDiagnostics"]
    ]


def public(symbols: list[dict[str, Any]], names: dict[str, object]) -> list[dict[str, Any]]:
    """The symbols of public names, where they are offered and where they are defined.

    Raises:
      SystemExit: the checker does not know a name.
    """
    known = {symbol["name"] for symbol in symbols}
    wanted = set()
    for name, thing in names.items():
        if inspect.ismodule(thing):
            continue
        where = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
        both = {name, ".".join(where) if all(where) else name} & known
        if not both:
            raise SystemExit(f"{name} is public, and a type checker does not find it")
        wanted |= both
    return [s for s in symbols if any(f"{s['name']}.".startswith(f"{name}.") for name in wanted)]


def faults_in_names(symbols: list[dict[str, Any]]) -> list[str]:
    """`name: what is wrong` of symbols, as `--verifytypes` gives them."""
    return [
        f"{symbol['name']}: {_line(one['message'])}"
        for symbol in symbols
        if not symbol["isTypeKnown"] and symbol["name"] not in OF_DEVICES
        for one in symbol["diagnostics"]
        if any(word in one["message"] for word in OWN)
    ]


def _line(message: str) -> str:
    return " ".join(message.replace("\xa0", " ").split())


def main() -> int:
    found = faults_in_bodies(checker())
    verified = checker("--verifytypes", PACKAGE, "--ignoreexternal")
    symbols = public(verified["typeCompleteness"]["symbols"], offered_names())
    found += faults_in_names(symbols)
    print("\n".join(found or [f"types: {len(symbols)} public symbols, no fault"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
