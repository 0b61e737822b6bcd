"""Named networks. Each states its source; `confidence` says whether it was measured or assumed."""

import csv
import functools
from collections.abc import Sequence
from importlib import resources

from lowcomm_jax.network.errors import ViolationsError
from lowcomm_jax.network.links import Network
from lowcomm_jax.network.parse import parse

DATA = "aws_region_pairs.csv"

SPECS: dict[str, dict] = {
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


def names() -> tuple[str, ...]:
    """List the presets; `aws:Oregon,Tokyo` picks any of the ten measured AWS regions."""
    return (*sorted(SPECS), "intercontinental", "aws")


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
    if name not in SPECS:
        known = f"use {', '.join(names())}, aws:A,B,... or a .yaml file"
        raise ViolationsError("network", [f"{name!r} is unknown: {known}"])
    return parse({"name": name, "confidence": "assumed", **SPECS[name]})


@functools.cache
def aws_pairs() -> tuple[tuple[str, str, float, float], ...]:
    """Read the 45 AWS pairs: (region, region, one-way delay in ms, Gbit/s)."""
    text = resources.files("lowcomm_jax.network").joinpath(DATA).read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(
        (row["region_a"], row["region_b"], float(row["delay_ms"]), float(row["bandwidth_gbps"]))
        for row in csv.DictReader(lines)
    )


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
