"""The small faults that can be put into a room: one change of one place of its source each.

Another comparison, another sign or operator, a condition negated or dropped, a number moved by one,
a keyword left out. `tests/mutate.py` judges them.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def changes(node: ast.AST) -> list[ast.expr]:
    """What may stand in the place of one expression."""
    found: list[ast.expr] = []
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            found.append(ast.Compare(left, [COMPARISONS[type(op)]()], [right]))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            found.append(ast.BinOp(left, OPERATORS[type(op)](), right))
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            found += [ast.BoolOp(other, values), values[0], values[-1]]
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            found.append(operand)
        case ast.IfExp(_, body, orelse):
            found += [body, orelse]
        case ast.Constant(bool() as value):
            found.append(ast.Constant(not value))
        case ast.Constant(int() | float() as value):
            found.append(ast.Constant(value + 1))
        case ast.Call(function, arguments, keywords) if keywords:
            found += [
                ast.Call(function, arguments, keywords[:i] + keywords[i + 1 :])
                for i in range(len(keywords))
                if keywords[i].arg
            ]
    return found


def mutants(path: str, source: str) -> list[dict]:
    """All mutants of one file: where, from what, to what, and an `id` that other edits leave as is.

    The id is a digest of file, function, the text before and after, and which of several alike in
    that function it is.
    """
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    tree, found, alike = ast.parse(source), [], Counter()
    skipped, named = no_behaviour(tree), functions(tree)
    for node in ast.walk(tree):
        for new in changes(node) if id(node) not in skipped else ():
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            text = f"({ast.unparse(ast.fix_missing_locations(new))})"
            old = source.encode()[begin:end].decode()
            within = [n.name for n in named if n.lineno <= node.lineno <= n.end_lineno]
            what = (path, ".".join(within), old, text)
            alike[what] += 1
            digest = hashlib.sha256(repr((*what, alike[what])).encode()).hexdigest()[:12]
            where = {"id": digest, "path": path, "line": node.lineno, "last": node.end_lineno}
            place = {"begin": begin, "end": end, "function": what[1]}
            found.append({**where, **place, "old": old, "new": text})
    return found


def no_behaviour(tree: ast.AST) -> set[int]:
    """Nodes whose change tests need not see: decorators, annotations, messages."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts = (getattr(node, "annotation", None), getattr(node, "returns", None))
        for part in (*getattr(node, "decorator_list", ()), *filter(None, parts)):
            skipped |= set(map(id, ast.walk(part)))
        if isinstance(node, ast.JoinedStr | ast.Raise):
            skipped |= set(map(id, ast.walk(node)))
    return skipped


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """All functions and classes, the outer before those within."""
    named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node for node in ast.walk(tree) if isinstance(node, named)]


def of_room(room: str) -> list[dict]:
    """All mutants of `lowcomm_jax/ROOM`."""
    files = sorted((ROOT / "lowcomm_jax" / room).rglob("*.py"))
    return [m for f in files for m in mutants(str(f.relative_to(ROOT)), f.read_text())]


def sample(found: list[dict], seed: int) -> list[dict]:
    """The mutants in an order by seed and id: an edit moves no other mutant in or out."""
    return sorted(found, key=lambda m: hashlib.sha256(f"{seed} {m['id']}".encode()).digest())
