"""Formulas and tables of docstrings that are written as Markdown, as reStructuredText.

Rules of `outer`, `landing` and `compression` have `$$` formulas and tables with bars; methods have
reStructuredText already. Napoleon reads the sections (`Args:` ...) afterwards.
"""

import re

_INLINE = re.compile(r"(?<![\\$`])\$(?!\$)([^$\n]+?)\$(?!\$)")
_RULE_OF_A_TABLE = re.compile(r"\|(?:\s*:?-+:?\s*\|)+")
# A `|` inside a formula is no border.
_BORDER = re.compile(r"(?<!\\)\|(?=(?:[^$]*\$[^$]*\$)*[^$]*$)")


def convert(app, what, name, obj, options, lines) -> None:
    """Sphinx's `autodoc-process-docstring`: rewrite `lines` in place."""
    del app, what, name, obj, options
    lines[:] = to_rst(lines)


def to_rst(lines: list[str]) -> list[str]:
    """The docstring with `.. math::` and `.. list-table::` for `$$` and bars."""
    out, rest = [], list(lines)
    while rest:
        line = rest.pop(0)
        if line.lstrip().startswith("$$"):
            block = [line]
            while not (len(block) > 1 or line.count("$$") > 1) or block[-1].count("$$") == 0:
                block.append(rest.pop(0))
                if "$$" in block[-1]:
                    break
            out += _formula(block)
        elif line.lstrip().startswith("|") and rest and _RULE_OF_A_TABLE.fullmatch(rest[0].strip()):
            rest.pop(0)
            rows = [line]
            while rest and rest[0].lstrip().startswith("|"):
                rows.append(rest.pop(0))
            out += _table(rows)
        else:
            out.append(_inline(line))
    return out


def _inline(text: str) -> str:
    return _INLINE.sub(lambda found: f":math:`{found[1]}`", text)


def _formula(block: list[str]) -> list[str]:
    indent = block[0][: len(block[0]) - len(block[0].lstrip())]
    whole = "\n".join(block)
    formula, after = whole.split("$$")[1:3]
    inside = [f"{indent}   {line.strip()}" for line in formula.strip().splitlines()]
    tail = after.strip()
    return ["", f"{indent}.. math::", "", *inside, "", *([indent + _inline(tail)] if tail else [])]


def _table(rows: list[str]) -> list[str]:
    indent = rows[0][: len(rows[0]) - len(rows[0].lstrip())]
    out = ["", f"{indent}.. list-table::", f"{indent}   :header-rows: 1", ""]
    for row in rows:
        cells = [cell.strip() for cell in _BORDER.split(row.strip().strip("|"))]
        for number, cell in enumerate(cells):
            out.append(f"{indent}   {'*' if number == 0 else ' '} - {_inline(cell)}")
    return [*out, ""]
