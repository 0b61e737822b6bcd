"""Reads a compiled program's text: its computations, how often each runs, its instructions.

It reads only the parts of XLA's optimised HLO that the other modules need, for GPU, TPU and CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([0-9,]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_REFERENCE = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"\}')
_COMMENT = re.compile(r"/\*.*?\*/")
_OF_SCALARS = ("reduce", "all-reduce", "reduce-scatter", "scatter", "sort", "map", "reduce-window")
_FRAME = re.compile(r"stack_frame_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class HloArray:
    """One array of an instruction's result.

    Attributes:
      dtype: HLO's name, such as `bf16`.
      space: number of the memory that holds it: 0 is the device's main one, 1 on a TPU the chip's.
    """

    dtype: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.ceil(self.size * bytes_each(self.dtype))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      result: its type, as written; a tuple's begins with a bracket.
      operands: names of the instructions that it reads.
      attributes: the text after the operands.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[HloArray, ...]:
        """All arrays of the result, nested tuples in one row."""
        return tuple(
            HloArray(kind, tuple(map(int, filter(None, dims.split(",")))), int(space or 0))
            for kind, dims, space in _SHAPE.findall(self.result)
        )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def base(self) -> str:
        """The opcode, with that of an asynchronous start or end as the plain one."""
        return re.sub(r"-(start|done)$", "", self.opcode)

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes; None = it is not there."""
        found = re.search(pattern, self.attributes)
        return found and found[1]

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @property
    def called(self) -> dict[str, str]:
        """Computations that it runs, by role."""
        return dict(_CALLED.findall(self.attributes))

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations of which it runs one."""
        listed = self.attribute(_BRANCHES.pattern)
        if listed is not None:
            return tuple(name.strip().lstrip("%") for name in listed.split(","))
        both = self.called
        return tuple(both[k] for k in ("true_computation", "false_computation") if k in both)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      computations: by name, instructions in the order in which they are scheduled.
      entry: name of the one that runs first.
      sources: stack frame number -> "file:line".
    """

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    sources: dict[int, str]

    def instructions(self) -> Iterator[tuple[Instruction, str, float]]:
        """(instruction, its computation, how often it runs), of all that run.

        Loops count as often as they are known to run; one whose number of trips is a traced value
        counts once. Of a conditional the branch counts that moves most between devices.
        """
        for name, times in self._times.items():
            for one in self.computations[name]:
                yield one, name, times

    @functools.cached_property
    def _times(self) -> dict[str, float]:
        times: dict[str, float] = {}

        def visit(name: str, count: float) -> None:
            times[name] = times.get(name, 0) + count
            for one in self.computations[name]:
                each = count * (self.trips(one) or 1) if one.opcode == "while" else count
                inner = set(one.called.values()) - set(one.branches)
                if one.branches:
                    inner.add(self.branch(one))
                if one.base in _OF_SCALARS:
                    inner = set()
                for called in inner:
                    if called in self.computations:
                        visit(called, each)

        visit(self.entry, 1)
        return times

    def branch(self, one: Instruction) -> str:
        """The branch of a conditional that moves most between devices."""
        return max(one.branches, key=self._moved)

    def _moved(self, computation: str) -> int:
        """Bytes that collectives of a computation give, and of those that it runs."""
        total = 0
        for one in self.computations.get(computation, ()):
            total += one.nbytes if "channel_id" in one.attributes else 0
            total += sum(map(self._moved, {*one.called.values(), *one.branches}))
        return total

    def named(self, computation: str) -> dict[str, Instruction]:
        """The instructions of a computation by name."""
        return self._named[computation]

    @functools.cached_property
    def _named(self) -> dict[str, dict[str, Instruction]]:
        return {name: {one.name: one for one in ones} for name, ones in self.computations.items()}

    def trips(self, loop: Instruction) -> int | None:
        """How often a `while` runs; None = its number of trips is a traced value.

        A GPU's text says it. A TPU's does not: there it is read from `counter < limit` in the
        condition and `counter + step` in the body; a counter starts at 0.
        """
        known = loop.attribute(_TRIPS.pattern)
        if known is not None:
            return int(known)
        condition, body = (self.named(loop.called[role]) for role in ("condition", "body"))
        compare, result = (_root(each) for each in (condition, body))
        if compare.opcode != "compare" or compare.attribute(r"direction=(\w+)") != "LT":
            return None
        counter, limit = (condition.get(name) for name in compare.operands)
        if counter is None or limit is None or limit.opcode != "constant":
            return None
        stepped = body.get(result.operands[int(counter.attribute(r"index=(\d+)") or 0)])
        steps = [body[name] for name in stepped.operands if body[name].opcode == "constant"]
        step = _value(steps[0]) if stepped.opcode == "add" and steps else 1
        return -(-_value(limit) // step)

    def source(self, one: Instruction) -> str:
        """Line of Python that an instruction comes from; "" = unknown."""
        frame = one.attribute(_FRAME.pattern)
        return self.sources.get(int(frame), "") if frame else ""


def _root(computation: dict[str, Instruction]) -> Instruction:
    return next(one for one in computation.values() if one.is_root)


def _value(constant: Instruction) -> int:
    return int(constant.attributes.split(")")[0])


def bytes_each(dtype: str) -> float:
    """Bytes of a value of an HLO type."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 0


def parse(text: str) -> Program:
    """Read `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            head = _COMPUTATION.match(line)
            if head:
                current = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
        elif line.rstrip() == "}":
            current = None
        else:
            one = _instruction(line)
            if one is not None:
                current.append(one)
    return Program(
        {name: tuple(ones) for name, ones in computations.items()}, entry, _sources(text)
    )


def _instruction(line: str) -> Instruction | None:
    head = _NAME.match(line)
    if head is None:
        return None
    rest = _COMMENT.sub("", line[head.end() :])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else _type_end(rest)
    result, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    close = _closing("(" + rest, 0) - 1
    inside, attributes = rest[:close], rest[close + 1 :]
    if opcode in ("constant", "parameter"):
        return Instruction(head[2], opcode, result, (), f"{inside}){attributes}", bool(head[1]))
    operands = tuple(_REFERENCE.findall(inside))
    return Instruction(head[2], opcode, result, operands, attributes, bool(head[1]))


def _type_end(text: str) -> int:
    """Where the type at the start of a text ends: at the first blank outside of all brackets."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == " " and depth == 0:
            return i
    return len(text)


def _closing(text: str, at: int) -> int:
    """Index of the bracket that closes the one at `at`; strings may hold any."""
    depth, quoted = 0, False
    for i in range(at, len(text)):
        letter = text[i]
        if letter == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (letter == "(") - (letter == ")")
            if depth == 0:
                return i
    return len(text)


def _sources(text: str) -> dict[int, str]:
    """The tables at the head of a text: stack frame -> file and line."""
    tables = {name: _table(text, name) for name in ("FileNames", "FileLocations", "StackFrames")}
    files = {k: v.strip('"') for k, v in tables["FileNames"].items()}
    places = {}
    for key, value in tables["FileLocations"].items():
        file, line = (re.search(rf"{what}=(\d+)", value) for what in ("file_name_id", "line"))
        if file and line:
            places[key] = f"{files.get(int(file[1]), '?')}:{line[1]}"
    frames = {}
    for key, value in tables["StackFrames"].items():
        place = re.search(r"file_location_id=(\d+)", value)
        if place:
            frames[key] = places.get(int(place[1]), "")
    return frames


def _table(text: str, name: str) -> dict[int, str]:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = found[1].splitlines() if found else []
    return {int(row.split(" ", 1)[0]): row.split(" ", 1)[1] for row in rows}
