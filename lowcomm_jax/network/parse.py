"""Read a network from a mapping, an ml-collections config, a YAML file or a preset's name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowcomm_jax.network.errors import raise_all
from lowcomm_jax.network.links import Network, violations
from lowcomm_jax.network.randomness import Jitter

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
        ValueError: one message with every violation and the smallest change that would work.
    """
    if isinstance(spec, Network):
        raise_all(f"network {spec.name!r}", violations(spec))
        return spec
    if isinstance(spec, str | Path):
        return _from_name(spec)
    plain = spec.to_dict() if not isinstance(spec, Mapping) else dict(spec)
    return _from_mapping(plain)


def _from_name(name: str | Path) -> Network:
    from lowcomm_jax.network import presets  # presets are themselves parsed descriptions

    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        import yaml

        if not path.is_file():
            raise ValueError(f"network file {path} does not exist")
        content = yaml.safe_load(path.read_text())
        if not isinstance(content, Mapping):
            raise ValueError(
                f"network file {path} holds {type(content).__name__}: it must hold a mapping"
            )
        return _from_mapping({"name": path.stem, **content})
    return presets.preset(str(name))


def _from_mapping(spec: dict) -> Network:
    found: list[str] = []
    label = f"network {spec.get('name', 'unnamed')!r}"
    unknown = sorted(set(spec) - KEYS)
    found += [f"key {k!r} is unknown: use {', '.join(sorted(KEYS))}" for k in unknown]
    missing = [k for k in ("regions", "bandwidth_gbps") if k not in spec]
    if missing:
        raise_all(label, found + [f"key {k!r} is missing: give it" for k in missing])
    names = _names(spec["regions"], found)
    if not names:
        raise_all(label, found or ["regions is empty: name at least one region"])
    count = len(names)
    symmetric = bool(spec.get("symmetric", True))
    bandwidth_RxR = _matrix(
        "bandwidth_gbps", spec["bandwidth_gbps"], count, symmetric, names, found
    )
    delay_RxR = _matrix("delay_ms", spec.get("delay_ms", 0.0), count, symmetric, names, found)
    loss_RxR = _matrix("loss", spec.get("loss", 0.0), count, symmetric, names, found)
    for number, link in enumerate(spec.get("links", ())):
        _override(number, dict(link), names, bandwidth_RxR, delay_RxR, loss_RxR, found)
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
        **scalars,
    )
    raise_all(label, found + violations(network))
    return network


def _names(regions: Any, found: list[str]) -> tuple[str, ...]:
    if (
        isinstance(regions, bool)
        or not isinstance(regions, int | Sequence)
        or isinstance(regions, str)
    ):
        found.append(f"regions is {regions!r}: use a number or a list of names")
        return ()
    if isinstance(regions, int):
        return tuple(f"r{i}" for i in range(regions))
    return tuple(str(name) for name in regions)


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
    """Read a number or a square matrix; note what does not parse."""
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


def _override(
    number, link: dict, names, bandwidth_RxR, delay_RxR, loss_RxR, found: list[str]
) -> None:
    where = f"links[{number}]"
    pair = link.get("pair")
    found += [
        f"{where} key {k!r} is unknown: use {', '.join(sorted(LINK_KEYS))}"
        for k in sorted(set(link) - LINK_KEYS)
    ]
    if (
        not isinstance(pair, Sequence)
        or isinstance(pair, str)
        or len(pair) != 2
        or not set(pair) <= set(names)
    ):
        found.append(f"{where}.pair is {pair!r}: use two of {', '.join(names)}")
        return
    i, j = names.index(pair[0]), names.index(pair[1])
    if i == j:
        found.append(f"{where}.pair joins {pair[0]!r} with itself: use two different regions")
        return
    for key, matrix_RxR in (
        ("bandwidth_gbps", bandwidth_RxR),
        ("delay_ms", delay_RxR),
        ("loss", loss_RxR),
    ):
        if key not in link:
            continue
        value = link[key]
        up, down = (
            (value.get("up"), value.get("down")) if isinstance(value, Mapping) else (value, value)
        )
        matrix_RxR[i, j] = _number(f"{where}.{key}", up, found)
        matrix_RxR[j, i] = _number(f"{where}.{key}", down, found)


def _jitter(key: str, spec: dict, found: list[str]) -> Jitter:
    value = spec.get(key)
    if value is None:
        return Jitter()
    if not isinstance(value, Mapping) or not set(value) <= {"kind", "scale"}:
        found.append(f"{key} is {value!r}: use {{kind: lognormal, scale: 0.3}}")
        return Jitter()
    return Jitter(
        str(value.get("kind", "lognormal")),
        float(_number(f"{key}.scale", value.get("scale", 0.0), found)),
    )
