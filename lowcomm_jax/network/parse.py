"""Reads a network from a mapping, an ml-collections config, a YAML file or a preset's name.

`parse` takes any of these and gives a `Network`, or raises `Refused` with all that is
wrong. `preset` and `aws` give named networks. Each states its source, and its `confidence` says
whether it was measured or assumed.
"""

import csv
import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from lowcomm_jax.network.links import Network, violations
from lowcomm_jax.network.randomness import Jitter
from lowcomm_jax.refused import Refused, is_unknown, refuse

DATA = "aws_region_pairs.csv"
KEYS = frozenset(
    [
        "name",
        "regions",
        "bandwidth_gbps",
        "delay_ms",
        "loss",
        "symmetric",
        "links",
        "egress_gbps",
        "ingress_gbps",
        "compute_s",
        "compute_jitter",
        "transfer_jitter",
        "sync_constant_s",
        "first_use_s",
        "control_bytes",
        "control_rate",
        "source",
        "confidence",
    ]
)
LINK_KEYS = frozenset({"pair", "bandwidth_gbps", "delay_ms", "loss"})
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
            / ml-collections ConfigDict with the keys

            - regions: number or list of names;
            - bandwidth_gbps, delay_ms, loss: one number, or an [R, R] matrix (row sends);
            - symmetric (default true): matrices must be symmetric; false allows other speeds up and
              down;
            - links: list of {pair: [a, b], bandwidth_gbps: x or {up: x, down: y}, delay_ms, loss}
              that override single pairs (up = a to b);
            - egress_gbps, ingress_gbps, compute_s: one number or one per region (null = no limit);
            - compute_jitter, transfer_jitter: {kind: none | lognormal | uniform, scale: x};
            - sync_constant_s, first_use_s, control_bytes, control_rate, name, source, confidence.

    Raises:
        Refused: every violation with the smallest change that would work.
    """
    if isinstance(spec, Network):
        refuse(f"network {spec.name!r}", violations(spec))
        return spec
    if isinstance(spec, str | Path):
        return _from_name(spec)
    if isinstance(spec, ConfigDict):
        spec = spec.to_dict()
    if isinstance(spec, Mapping):
        return _from_mapping(spec)
    fix = "use a preset's name, the path of a .yaml file, or a mapping with regions and "
    raise Refused("network", [f"{spec!r} is no network: {fix}bandwidth_gbps"])


def names() -> tuple[str, ...]:
    """List the presets; `aws:Oregon,Tokyo` picks any of the ten measured AWS regions."""
    return (*sorted(PRESETS), "intercontinental", "aws")


def preset(name: str) -> Network:
    """Give a preset by its name.

    Args:
        name: one of `names()`, or "aws:A,B,C" for a subset of the measured AWS regions.

    Raises:
        ValueError: unknown name or region.
    """
    if name == "intercontinental":
        return aws(INTERCONTINENTAL, name=name)
    if name == "aws":
        return aws()
    if name.startswith("aws:"):
        return aws([part.strip() for part in name[4:].split(",") if part.strip()], name=name)
    if name not in PRESETS:
        others = "aws:A,B,... or a .yaml file"
        raise Refused("network", [f"{name!r} {is_unknown(name, names())}, {others}"])
    return parse({"name": name, "confidence": "assumed", **PRESETS[name]})


def aws(
    regions: Sequence[str] | None = None,
    bandwidth_factor: float = 1.0,
    delay_factor: float = 1.0,
    name: str = "aws",
) -> Network:
    """Build a network of measured AWS regions.

    Args:
        regions: names out of the ten in the table; None takes all.
        bandwidth_factor: 0.5 follows the later user who found the table optimistic.
        delay_factor: 0.5 reads the table's delays as round trips (see the header of the data file).
        name: label of the network.

    Raises:
        ValueError: unknown region.
    """
    pairs = aws_pairs()
    known = tuple(dict.fromkeys(region for pair in pairs for region in pair[:2]))
    links = [
        {
            "pair": [a, b],
            "delay_ms": delay * delay_factor,
            "bandwidth_gbps": gbps * bandwidth_factor,
        }
        for a, b, delay, gbps in pairs
    ]
    everything = parse(
        {
            "name": name,
            "regions": list(known),
            "bandwidth_gbps": 1.0,
            "links": links,
            "source": "45 AWS pairs measured by DT-FM (arXiv 2206.01288)",
            "confidence": "measured",
        }
    )
    return everything if regions is None else everything.subset(list(regions))


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
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return _from_mapping({"name": path.stem, **_read(path)})
    return preset(str(name))


def _read(path: Path) -> Mapping:
    import yaml

    if not path.is_file():
        raise Refused("network", [f"file {path} does not exist"])
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise Refused("network", [f"file {path} is no YAML: {reason}"]) from error
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise Refused("network", [f"file {path} holds {kind}: it must hold a mapping"])
    return content


def _from_mapping(given: Mapping) -> Network:
    """The network of a description; raises Refused with all that is wrong with it."""
    spec = {key: value for key, value in given.items() if value is not None}
    found: list[str] = []
    label = f"network {spec.get('name', 'unnamed')!r}"
    unknown = sorted(set(spec) - KEYS, key=str)
    found += [f"key {k!r} {is_unknown(k, sorted(KEYS))}" for k in unknown]
    missing = [k for k in ("regions", "bandwidth_gbps") if k not in spec]
    if missing:
        refuse(label, found + [f"key {k!r} is missing: give it" for k in missing])
    names = _names(spec["regions"], found)
    if not names:
        refuse(label, found or ["regions is empty: name at least one region"])
    count = len(names)
    symmetric = spec.get("symmetric", True)
    if not isinstance(symmetric, bool):
        found.append(f"symmetric is {symmetric!r}: use true or false")
    bandwidth_RxR = _matrix(
        "bandwidth_gbps", spec["bandwidth_gbps"], count, symmetric, names, found
    )
    delay_RxR = _matrix("delay_ms", spec.get("delay_ms", 0.0), count, symmetric, names, found)
    loss_RxR = _matrix("loss", spec.get("loss", 0.0), count, symmetric, names, found)
    matrices = {"bandwidth_gbps": bandwidth_RxR, "delay_ms": delay_RxR, "loss": loss_RxR}
    _overrides(spec.get("links", ()), names, matrices, found)
    egress_R = _vector("egress_gbps", spec.get("egress_gbps"), count, found)
    ingress_R = _vector("ingress_gbps", spec.get("ingress_gbps"), count, found)
    compute_R = _vector("compute_s", spec.get("compute_s", 1.0), count, found)
    scalars = {
        key: _number(key, spec.get(key, 0), found)
        for key in ("sync_constant_s", "first_use_s", "control_bytes", "control_rate")
    }
    network = Network(
        name=str(spec.get("name", "unnamed")),
        regions=names,
        bandwidth_RxR=bandwidth_RxR,
        delay_RxR=delay_RxR / 1e3,
        loss_RxR=loss_RxR,
        egress_R=egress_R,
        ingress_R=ingress_R,
        compute_R=compute_R,
        compute_jitter=_jitter("compute_jitter", spec, found),
        transfer_jitter=_jitter("transfer_jitter", spec, found),
        source=str(spec.get("source", "given by the user")),
        confidence=str(spec.get("confidence", "assumed")),
        compute_given="compute_s" in spec,
        **scalars,
    )
    refuse(label, found + violations(network))
    return network


def _names(regions: Any, found: list[str]) -> tuple[str, ...]:
    whole = isinstance(regions, int) and not isinstance(regions, bool)
    if whole and regions >= 1:
        return tuple(f"r{i}" for i in range(regions))
    if whole or not isinstance(regions, Sequence) or isinstance(regions, str):
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


def _number(label: str, value: Any, found: list[str]) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    found.append(f"{label} is {value!r}: use a number")
    return 0.0


def _vector(label: str, value: Any, count: int, found: list[str]) -> np.ndarray:
    items = (
        list(value)
        if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
        else [value] * count
    )
    if len(items) != count:
        found.append(
            f"{label} has {len(items)} entries: use one number, or {count} (one per region)"
        )
        return np.ones(count)
    limit = label != "compute_s"
    return np.array(
        [np.inf if item is None and limit else _number(label, item, found) for item in items], float
    )


def _matrix(label, value, count: int, symmetric: bool, names, found: list[str]) -> np.ndarray:
    """Read a number or a square matrix; add a violation where it cannot be read."""
    filler_RxR = np.ones((count, count)) if label == "bandwidth_gbps" else np.zeros((count, count))
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        return np.full((count, count), float(_number(label, value, found)))
    rows = [list(row) if isinstance(row, Sequence | np.ndarray) else [row] for row in value]
    if len(rows) != count or any(len(row) != count for row in rows):
        shape = f"{len(rows)} rows of lengths {[len(row) for row in rows]}"
        found.append(
            f"{label} has {shape}: with {count} regions it must be {count} rows of {count}"
        )
        return filler_RxR
    before = len(found)
    matrix_RxR = np.array(
        [
            [
                0.0 if i == j or cell is None else _number(f"{label}[{i}][{j}]", cell, found)
                for j, cell in enumerate(row)
            ]
            for i, row in enumerate(rows)
        ],
        float,
    )
    if len(found) > before:
        return filler_RxR
    if symmetric:
        found += [
            f"{label} {names[i]} -> {names[j]} is {matrix_RxR[i, j]:g} but {names[j]} -> "
            f"{names[i]} is "
            f"{matrix_RxR[j, i]:g}: make them equal, or set symmetric: false"
            for i, j in np.argwhere(np.triu(matrix_RxR != matrix_RxR.T))
        ]
    return matrix_RxR


def _overrides(links: Any, names, matrices: dict[str, np.ndarray], found: list[str]) -> None:
    """Put the links of single pairs into the matrices."""
    if not isinstance(links, Sequence) or isinstance(links, str):
        found.append(f"links is {links!r}: use a list of {_LINK}")
        return
    for number, link in enumerate(links):
        _override(f"links[{number}]", link, names, matrices, found)


def _override(
    where: str, link: Any, names, matrices: dict[str, np.ndarray], found: list[str]
) -> None:
    """Set one entry of `links` in the matrices, or add what is wrong with it to `found`."""
    if not isinstance(link, Mapping):
        found.append(f"{where} is {link!r}: use {_LINK}")
        return
    found += [
        f"{where} key {k!r} {is_unknown(k, sorted(LINK_KEYS))}"
        for k in sorted(set(link) - LINK_KEYS, key=str)
    ]
    pair = link.get("pair")
    two = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
    if not two or not all(_is_name(end) and str(end) in names for end in pair):
        found.append(f"{where}.pair is {pair!r}: use two of {', '.join(names)}")
        return
    i, j = (names.index(str(end)) for end in pair)
    if i == j:
        found.append(f"{where}.pair joins {pair[0]!r} with itself: use two different regions")
        return
    for key, matrix_RxR in matrices.items():
        value = link.get(key)
        if value is None:
            continue
        both = (value.get("up"), value.get("down")) if isinstance(value, Mapping) else (value,) * 2
        matrix_RxR[i, j] = _number(f"{where}.{key}", both[0], found)
        matrix_RxR[j, i] = _number(f"{where}.{key}", both[1], found)


def _jitter(key: str, spec: dict, found: list[str]) -> Jitter:
    value = spec.get(key)
    if value is None:
        return Jitter()
    if not isinstance(value, Mapping) or not set(value) <= {"kind", "scale"}:
        found.append(f"{key} is {value!r}: use {{kind: lognormal, scale: 0.3}}")
        return Jitter()
    scale = float(_number(f"{key}.scale", value.get("scale", 0.0), found))
    return Jitter(str(value.get("kind", "lognormal")), scale)
