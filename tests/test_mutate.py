"""The mutation run: its faults compile and change something, and its rate is a rate."""

import ast

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
    found = mutate.mutants("f.py", SOURCE)
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
    found = mutate.of_room(room)
    assert len(found) > 30
    for mutant in found[:: max(1, len(found) // 20)]:
        source = (mutate.ROOT / mutant["path"]).read_text()
        ast.parse(mutated(mutant, source))


def test_equivalent_mutants_do_not_count():
    killed, survivor = {"killed_by": "t", "verdict": ""}, {"killed_by": None, "verdict": ""}
    same = {"killed_by": None, "verdict": "equivalent: it is rounded afterwards"}
    assert mutate.rate([killed] * 90 + [survivor] * 10 + [same] * 5) == (
        "90 of 100 killed: 90.0% [82.6%, 94.5%]"
    )
    assert mutate.rate([same]) == "nothing was judged"
