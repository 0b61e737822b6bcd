"""Reads a network from a mapping, an ml-collections config, a YAML file or a preset's name.

`parse` takes any of these and gives a `Network`, or raises `Refused` with all that is wrong. Which
numbers a description may hold say the fields of `Network` (`links.Entry`). A preset states its
source, and its `confidence` says whether it was measured or assumed.
"""

import csv
import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from lowcomm_jax.network.links import ENTRIES, Entry, Network, violations
from lowcomm_jax.network.randomness import Jitter
from lowcomm_jax.refused import Refused, is_unknown, refuse

DATA = "aws_region_pairs.csv"
NUMBERS = {entry.key: entry for _, entry in ENTRIES}
OF_PAIRS = tuple(key for key, entry in NUMBERS.items() if entry.per == "pair")
TEXTS = ("name", "source", "confidence")
JITTERS = ("compute_jitter", "transfer_jitter")
KEYS = sorted(["regions", "symmetric", "links", *NUMBERS, *TEXTS, *JITTERS])
_LINK = "{pair: [a, b], bandwidth_gbps: 1, delay_ms: 30}"
PRESETS: dict[str, dict] = {
    "lan": {
        "regions": 4,
        "bandwidth_gbps": 10.0,
        "delay_ms": 0.2,
        "egress_gbps": 10.0,
        "ingress_gbps": 10.0,
        "source": "assumed: 10 Gbit/s Ethernet in one building",
    },
    "datacenter": {
        "regions": 4,
        "bandwidth_gbps": 200.0,
        "delay_ms": 0.02,
        "egress_gbps": 200.0,
        "ingress_gbps": 200.0,
        "source": "assumed: one 200 Gbit/s port per region between halls of one site",
    },
    "us_4_regions": {
        "regions": ["west", "central", "east", "south"],
        "bandwidth_gbps": [[0, 3, 2, 2], [3, 0, 5, 4], [2, 5, 0, 3], [2, 4, 3, 0]],
        "delay_ms": [[0, 18, 32, 25], [18, 0, 14, 12], [32, 14, 0, 16], [25, 12, 16, 0]],
        "source": "2-5 Gbit/s published for four US regions (arXiv 2604.21428); the rest assumed",
    },
    "consumer_1gbps": {
        "regions": 4,
        "bandwidth_gbps": 1.0,
        "delay_ms": 20.0,
        "egress_gbps": 1.0,
        "ingress_gbps": 1.0,
        "transfer_jitter": {"kind": "lognormal", "scale": 0.2},
        "sync_constant_s": 0.1,
        "first_use_s": 0.5,
        "source": "assumed: 1 Gbit/s access lines; first use within the measured 0.35-0.75 s",
    },
}
INTERCONTINENTAL = ("Oregon", "Virginia", "Frankfurt", "Tokyo")


def parse(spec: Any) -> Network:
    """Build a `Network` from its description.

    Args:
        spec: a `Network` (returned as it is), a preset's name, a path to a YAML file, or a mapping
            / ml-collections ConfigDict / its text in YAML, in braces, with the keys

            - regions: number or list of names;
            - bandwidth_gbps, delay_ms, loss: one number, or an [R, R] matrix (row sends);
            - symmetric (default true): matrices must be symmetric; false allows other speeds up and
              down;
            - links: list of {pair: [a, b], bandwidth_gbps: x or {up: x, down: y}, delay_ms, loss}
              that override single pairs (up = a to b);
            - egress_gbps, ingress_gbps, compute_s: one number or one per region (null = no limit);
            - compute_jitter, transfer_jitter: {kind: none | lognormal | uniform, scale: x};
            - sync_constant_s, first_use_s, name, source, confidence.

    Raises:
        Refused: every violation with the smallest change that would work.
    """
    if isinstance(spec, Network):
        refuse(f"network {spec.name!r}", violations(spec))
        return spec
    if isinstance(spec, str | Path):
        text = str(spec).strip()
        return _from_mapping(_loaded(text, "text")) if text[:1] == "{" else _from_name(spec)
    if isinstance(spec, ConfigDict):
        spec = spec.to_dict()
    if isinstance(spec, Mapping):
        return _from_mapping(spec)
    fix = "use a preset's name, the path of a .yaml file, or a mapping with regions and "
    raise Refused("network", [f"{spec!r} is no network: {fix}bandwidth_gbps"])


def names() -> tuple[str, ...]:
    """List the presets; `aws:Oregon,Tokyo` picks any of the ten measured AWS regions."""
    return (*sorted(PRESETS), "intercontinental", "aws")


def _aws(name: str) -> Network:
    """The ten measured AWS regions."""
    pairs = aws_pairs()
    return _from_mapping(
        {
            "name": name,
            "regions": list(dict.fromkeys(region for pair in pairs for region in pair[:2])),
            "bandwidth_gbps": 1.0,
            "links": [
                {"pair": [a, b], "delay_ms": delay, "bandwidth_gbps": gbps}
                for a, b, delay, gbps in pairs
            ],
            "source": "45 AWS pairs measured by DT-FM (arXiv 2206.01288)",
            "confidence": "measured",
        }
    )


@functools.cache
def aws_pairs() -> tuple[tuple[str, str, float, float], ...]:
    """Read the 45 AWS pairs: (region, region, one-way delay in ms, Gbit/s)."""
    text = resources.files("lowcomm_jax.network").joinpath(DATA).read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(
        (row["region_a"], row["region_b"], float(row["delay_ms"]), float(row["bandwidth_gbps"]))
        for row in csv.DictReader(lines)
    )


# -- descriptions ------------------------------------------------------------------------------


def _from_name(name: str | Path) -> Network:
    path, name = Path(name), str(name)
    if path.suffix in (".yaml", ".yml"):
        return _from_mapping({"name": path.stem, **_in_file(path)})
    if name in PRESETS:
        return _from_mapping({"name": name, **PRESETS[name]})
    if name == "aws":
        return _aws(name)
    if name == "intercontinental":
        return _aws(name).subset(INTERCONTINENTAL)
    if name.startswith("aws:"):
        return _aws(name).subset([part.strip() for part in name[4:].split(",") if part.strip()])
    others = "aws:A,B,... or a .yaml file"
    raise Refused("network", [f"{name!r} {is_unknown(name, names())}, {others}"])


def _in_file(path: Path) -> Mapping:
    if not path.is_file():
        raise Refused("network", [f"file {path} does not exist"])
    return _loaded(path.read_bytes(), f"file {path}")


def _loaded(text: str | bytes, what: str) -> Mapping:
    """The mapping that YAML holds; `what` names it in refusals."""
    import yaml

    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise Refused("network", [f"{what} is no YAML: {reason}"]) from error
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise Refused("network", [f"{what} holds {kind}: it must hold a mapping"])
    return content


def _from_mapping(given: Mapping) -> Network:
    """The network of a description; raises Refused with all that is wrong with it."""
    spec = {key: value for key, value in given.items() if value is not None}
    label = f"network {spec.get('name', 'unnamed')!r}"
    unknown = sorted(set(spec).difference(KEYS), key=str)
    found = [f"key {key!r} {is_unknown(key, KEYS)}" for key in unknown]
    compute_given = "compute_s" in spec
    spec = {"compute_s": 1.0, "symmetric": True, "links": (), **spec}
    needed = ("regions", *(key for key, entry in NUMBERS.items() if entry.null is None))
    missing = [key for key in needed if key not in spec]
    if missing:
        refuse(label, found + [f"key {key!r} is missing: give it" for key in missing])
    names = _names(spec["regions"], found)
    if not names:
        refuse(label, found or ["regions is empty: name at least one region"])
    if not isinstance(spec["symmetric"], bool):
        found.append(f"symmetric is {spec['symmetric']!r}: use true or false")
    numbers = {
        key: _numbers(entry, spec.get(key), names, spec["symmetric"], found)
        for key, entry in NUMBERS.items()
    }
    _put_links(spec["links"], names, numbers, found)
    network = Network(
        **{"name": "unnamed"} | {key: str(spec[key]) for key in TEXTS if key in spec},
        **{name: _field(numbers[entry.key], entry) for name, entry in ENTRIES},
        **{key: _jitter(key, spec[key], found) for key in JITTERS if key in spec},
        regions=names,
        compute_given=compute_given,
    )
    refuse(label, found + violations(network))
    return network


def _field(values: np.ndarray, entry: Entry) -> np.ndarray | float:
    """In the units of the field of a `Network`."""
    return values / entry.parts if values.ndim else float(values / entry.parts)


def _names(regions: Any, found: list[str]) -> tuple[str, ...]:
    whole = isinstance(regions, int) and not isinstance(regions, bool)
    if whole and regions >= 1:
        return tuple(f"r{i}" for i in range(regions))
    if whole or not _is_list(regions):
        found.append(f"regions is {regions!r}: use a number of at least 1, or a list of names")
        return ()
    found += [
        f"regions[{i}] is {name!r}: use text or a whole number (in YAML quote names like 'no')"
        for i, name in enumerate(regions)
        if not _is_name(name)
    ]
    return tuple(str(name) for name in regions)


def _is_name(name: Any) -> bool:
    """Whole numbers name regions, too: YAML reads `regions: [1, 2]` as such."""
    return isinstance(name, str | int) and not isinstance(name, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)


def _number(label: str, value: Any, spare: float, found: list[str]) -> float:
    """A number; the spare one, and a line, where it is none."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    found.append(f"{label} is {value!r}: use a number")
    return spare


def _numbers(
    entry: Entry, value: Any, names: Sequence[str], symmetric: bool, found: list[str]
) -> np.ndarray:
    """One number for all, or a list of one a region, or a list of such rows."""
    key, count, before = entry.key, len(names), len(found)
    spare = 1.0 if entry.null is None else entry.null

    def number(label: str, value: Any) -> float:
        return _number(label, entry.null if value is None else value, spare, found)

    cells = np.full({"pair": (count, count), "region": (count,), "network": ()}[entry.per], spare)
    if not cells.ndim or not _is_list(value):
        cells[...] = number(key, value)
    elif entry.per == "region":
        if len(value) == count:
            cells[:] = [number(f"{key}[{i}]", cell) for i, cell in enumerate(value)]
        else:
            found.append(
                f"{key} has {len(value)} entries: use one number, or {count} (one per region)"
            )
    else:
        rows = [list(row) if _is_list(row) else [row] for row in value]
        if [len(row) for row in rows] == [count] * count:
            np.fill_diagonal(cells, 0.0)
            for i, j in np.argwhere(~np.eye(count, dtype=bool)):
                cells[i, j] = number(f"{key}[{i}][{j}]", rows[i][j])
        else:
            shape = f"{len(rows)} rows of lengths {[len(row) for row in rows]}"
            found.append(
                f"{key} has {shape}: with {count} regions it must be {count} rows of {count}"
            )
        if symmetric and len(found) == before:
            found += [
                f"{key} {names[i]} -> {names[j]} is {cells[i, j]:g} but {names[j]} -> {names[i]} "
                f"is {cells[j, i]:g}: make them equal, or set symmetric: false"
                for i, j in np.argwhere(np.triu(cells != cells.T))
            ]
    return cells


def _put_links(links: Any, names, numbers: dict[str, np.ndarray], found: list[str]) -> None:
    """Put the links of single pairs into the matrices, or what is wrong with them into `found`."""
    if not _is_list(links):
        found.append(f"links is {links!r}: use a list of {_LINK}")
        return
    for number, link in enumerate(links):
        where = f"links[{number}]"
        if not isinstance(link, Mapping):
            found.append(f"{where} is {link!r}: use {_LINK}")
            continue
        known = ("pair", *OF_PAIRS)
        unknown = sorted(set(link).difference(known), key=str)
        found += [f"{where} key {key!r} {is_unknown(key, known)}" for key in unknown]
        pair = link.get("pair")
        two = _is_list(pair) and len(pair) == 2
        if not two or not all(_is_name(end) and str(end) in names for end in pair):
            found.append(f"{where}.pair is {pair!r}: use two of {', '.join(names)}")
            continue
        i, j = (names.index(str(end)) for end in pair)
        if i == j:
            found.append(f"{where}.pair joins {pair[0]!r} with itself: use two different regions")
            continue
        for key in OF_PAIRS:
            for at, way in (((i, j), "up"), ((j, i), "down")):
                value, here = link.get(key), f"{where}.{key}"
                if isinstance(value, Mapping):
                    value, here = value.get(way), f"{here}.{way}"
                elif value is None:
                    continue
                numbers[key][at] = _number(here, value, numbers[key][at], found)


def _jitter(key: str, value: Any, found: list[str]) -> Jitter:
    if not isinstance(value, Mapping) or not set(value) <= {"kind", "scale"}:
        found.append(f"{key} is {value!r}: use {{kind: lognormal, scale: 0.3}}")
        return Jitter()
    scale = _number(f"{key}.scale", value.get("scale", 0.0), 0.0, found)
    return Jitter(str(value.get("kind", "lognormal")), scale)
