"""Read the collectives, their device groups and their bytes out of a compiled program's text."""

import math
import re
from typing import NamedTuple

import numpy as np

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2}
WIDTHS |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


class Collective(NamedTuple):
    """One collective instruction; `nbytes` of its result on one device, all buffers together."""

    kind: str
    dtypes: set[str]
    nbytes: int
    groups: list[list[int]]

    def sent(self, sender: int, others: int) -> float:
        """Bytes that `sender` hands to this many of the other devices of its group."""
        if self.kind == "collective-permute":
            return self.nbytes * others
        size = next(len(group) for group in self.groups if sender in group)
        # The result of an all-gather is everyone's operand; an all-to-all hands out shares.
        return self.nbytes * others / (1 if self.kind == "all-reduce" else size)


def collectives(compiled_text: str) -> list[tuple[str, list[list[int]]]]:
    """(kind, groups of device ids) of every collective instruction."""
    found = []
    for line in compiled_text.splitlines():
        match = re.search(rf"\s({KINDS})(?:-start)?\(", line)
        if match and "-done(" not in line:
            found.append((match.group(1), groups(line)))
    return found


def sized(compiled_text: str) -> list[Collective]:
    """Every collective instruction with its bytes; programs of synchronous collectives only."""
    found = []
    for line in compiled_text.splitlines():
        if match := re.search(rf"= (.*?)\s({KINDS})(-start)?\(", line):
            assert not match.group(3), f"asynchronous: {line}"
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", match.group(1))
            sizes = [WIDTHS[t] * math.prod(map(int, filter(None, n.split(",")))) for t, n in arrays]
            dtypes = {dtype for dtype, _ in arrays}
            found.append(Collective(match.group(2), dtypes, sum(sizes), groups(line)))
    return found


def sent_across(found: list[Collective], devices: int, regions: int) -> np.ndarray:
    """Bytes that leave each region, by every device of it; regions of `devices` devices each."""
    total = np.zeros(regions)
    for one in found:
        for group in one.groups:
            senders = group[:1] if one.kind == "collective-permute" else group
            for sender in senders:
                others = sum(d // devices != sender // devices for d in group)
                if others:
                    total[sender // devices] += one.sent(sender, others)
    return total


def groups(line: str) -> list[list[int]]:
    """Device groups of one instruction, in any of the four notations."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)", pairs.group(0))]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, source, order = (
            [int(n) for n in part.split(",")] if part else None for part in iota.groups()
        )
        ids = np.arange(np.prod(source)).reshape(source)
        return (ids if order is None else ids.transpose(order)).reshape(shape).tolist()
    if mesh := re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", line
    ):
        return mesh_groups(*mesh.groups())
    listed = re.search(r"replica_groups=\{((?:\{[\d,]+\},?\s*)+)\}", line)
    assert listed, f"no device groups in: {line}"
    return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", listed.group(0))]


def mesh_groups(axes: str, device_ids: str | None, reduced: str) -> list[list[int]]:
    """Groups written as named mesh axes: 'a'=4,'b'=2 with an optional device order, over {'b'}."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    ids = np.arange(np.prod(list(sizes.values())))
    if device_ids:
        shape, order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", device_ids).groups()
        ids = ids.reshape([int(n) for n in shape.split(",")])
        if order:
            ids = ids.transpose([int(n) for n in order.split(",")])
    grid = ids.reshape(list(sizes.values()))
    names = list(sizes)
    over = [names.index(name) for name in re.findall(r"'(\w+)'", reduced)]
    kept = [i for i in range(len(names)) if i not in over]
    width = int(np.prod([grid.shape[i] for i in over]))
    return grid.transpose(kept + over).reshape(-1, width).tolist()
