"""Read the collectives and their device groups out of a compiled program's text."""

import re

import numpy as np

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def collectives(compiled_text: str) -> list[tuple[str, list[list[int]]]]:
    """(kind, groups of device ids) of every collective instruction."""
    found = []
    for line in compiled_text.splitlines():
        match = re.search(rf"\s({KINDS})(?:-start)?\(", line)
        if match and "-done(" not in line:
            found.append((match.group(1), groups(line)))
    return found


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
