"""The mutation run: its faults compile and change something, and its rate is a rate."""

import ast
import re
import tomllib

import mutants
import mutate
import pytest

SOURCE = """
def f(a: int = 1, *, b=2):
    if a < b and not a == 3:
        raise ValueError(f"{a + 1}")
    return [a + 2, max(a, key=len)] if a else "é" + -b
"""


def mutated(mutant, source):
    data = source.encode()
    return (data[: mutant["begin"]] + mutant["new"].encode() + data[mutant["end"] :]).decode()


def test_mutants_of_a_few_lines():
    found = mutants.mutants("f.py", SOURCE)
    changes = {(m["old"], m["new"]) for m in found}
    assert {("a < b", "(a <= b)"), ("a == 3", "(a != 3)"), ("not a == 3", "(a == 3)")} <= changes
    assert {("a + 2", "(a - 2)"), ("2", "(3)"), ("-b", "(b)")} <= changes
    assert ("max(a, key=len)", "(max(a))") in changes
    assert not any("a + 1" in old for old, _ in changes), "a message is no behaviour"
    for mutant in found:
        tree = ast.parse(mutated(mutant, SOURCE))
        assert ast.dump(tree) != ast.dump(ast.parse(SOURCE)), mutant


@pytest.mark.parametrize("room", mutate.ROOMS)
def test_every_mutant_of_a_room_is_a_program(room):
    found = mutants.of_room(room)
    assert len(found) > 30
    for mutant in found[:: max(1, len(found) // 20)]:
        source = (mutants.ROOT / mutant["path"]).read_text()
        ast.parse(mutated(mutant, source))


def test_an_edit_elsewhere_leaves_the_ids():
    def ids(source):
        return [m["id"] for m in mutants.mutants("f.py", source)]

    assert len(set(ids(SOURCE * 2))) == 2 * len(ids(SOURCE)), "those alike are told apart"
    assert set(ids(SOURCE)) == set(ids("\n\nLIMIT = print()\n" + SOURCE))
    every = mutants.mutants("f.py", SOURCE)
    order = [m["id"] for m in mutants.sample(every, seed=0)]
    assert order != [m["id"] for m in mutants.sample(every, seed=1)]
    without = [m["id"] for m in mutants.sample(every[1:], seed=0)]
    assert without == [i for i in order if i != every[0]["id"]]


def test_tests_are_chosen_by_lines_then_by_kills_place_and_time():
    seconds = {"r/a.py::slow": 30.0, "r/a.py::quick": 0.2, "r/b.py::x": 0.1, "o/c.py::y": 0.1}
    seconds["r/a.py::beside"] = 0.01
    lines = {"f.py": {"1": [*seconds][:4], "2": [""]}, "g.py": {"1": ["r/b.py::x"]}}
    measured = mutate.Measured(seconds, lines)
    mutant = {"path": "f.py", "line": 1, "last": 1, "function": "f"}

    def chosen(judged=(), limit_s=60.0, **at):
        return mutate.chosen_tests({**mutant, **at}, measured, ["r"], judged, limit_s)

    turns = ["r/b.py::x", "r/a.py::quick", "o/c.py::y", "r/a.py::slow", "r/a.py::beside"]
    assert chosen() == turns
    assert chosen(limit_s=5) == [test for test in turns if test != "r/a.py::slow"]
    killed = [{"path": "f.py", "function": "g", "killed_by": "r/a.py::slow"}]
    assert chosen(killed)[0] == "r/a.py::slow"
    assert chosen(line=2, last=2)[0] == "r/a.py::beside", "at import: all of the room"
    assert chosen(line=3, last=3) == [], "never run"


def test_equivalent_mutants_do_not_count():
    def some(name, count, killed_by=None):
        return [{"id": f"{name}{i}", "killed_by": killed_by} for i in range(count)]

    same = some("e", 5)
    known = {m["id"]: "equivalent: it is rounded afterwards" for m in same}
    known |= {"s0": "test: tests/r/test_a.py::test_b", "s1": "open: memory alone"}
    assert mutate.rate(some("k", 89, "t") + some("s", 11) + same, known) == (
        "90 of 100 killed: 90.0% [82.6%, 94.5%]"
    )
    assert mutate.rate(same, known) == "nothing was judged"


def test_what_is_known_of_survivors_is_of_mutants_and_tests_that_are_there():
    known = tomllib.loads(mutate.VERDICTS.read_text())["mutant"]
    sources = {path: (mutants.ROOT / path).read_text() for path in {m["path"] for m in known}}
    made = {m["id"] for path, source in sources.items() for m in mutants.mutants(path, source)}
    assert [m for m in known if m["id"] not in made] == []
    for verdict in mutate.verdicts().values():
        for path, test in re.findall(r"(tests/\S+)::(\w+)", verdict):
            assert f"def {test}(" in (mutants.ROOT / path).read_text(), verdict
