"""How fast a payload gets from job to job by Arrow Flight with mutual TLS, of 4 streams and of 1.

    python -m experiments bench transfer [--mib=64,512,2560] [--rates=0,500] [--repeats=3]

Two processes meet in a temporary folder. One serves payloads of each size, the other pulls them,
and compares their digests. A rate (Mbit/s) puts them at the two ends of a link that token buckets
hold to it (Linux, root); 0 is the loopback. Rows are medians over the repeats; the time is that of
the pull alone, without making the payload and without its digest.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.bench import netem
from experiments.cli import Flags, flag_problems, refuse_any
from experiments.processes import run_together
from experiments.progress import right, tracked
from lowcomm_jax import exchange
from lowcomm_jax.runtime import streams, wire

STREAMS = (streams.STREAMS, 1)
"""Most connections that a pull uses."""
_SECONDS_TO_END = 600
_LOOK_S = 0.002


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module's docstring for the flags."""
    options = Flags()
    options.text("mib", "64,512,2560", "sizes of payloads in MiB")
    options.text("rates", "0,500", "Mbit/s of the link; 0 = the loopback")
    options.whole("repeats", 3, "pulls of each size")
    values = options.values
    wrong = flag_problems("bench transfer", argv, values, __doc__)
    sizes, rates = _numbers(values.mib, wrong), _numbers(values.rates, wrong)
    wrong += [] if all(sizes) else ["--mib: give sizes of at least 1"]
    wrong += [] if values.repeats > 0 else [f"--repeats={values.repeats}: give at least 1"]
    if any(rates):
        wrong += netem.problems()
    refuse_any(wrong, "bench transfer")
    columns = right(("Mbit/s", "streams", "MiB", "seconds", "MB/s"))
    table = Table(*columns, title="payloads from job to job")
    parts = [(f"{rate or 'loopback'}", f"{count}", rate) for rate in rates for count in STREAMS]
    for link, count, rate in tracked(parts, "bench transfer", lambda part: ", ".join(part[:2])):
        for mib, seconds in measure(int(count), rate, sizes, values.repeats).items():
            rows = link, count, f"{mib}", f"{seconds:.3f}"
            table.add_row(*rows, f"{mib * 2**20 / seconds / 1e6:.0f}")
    Console().print(table)
    return 0


def _numbers(text: str, wrong: list[str]) -> list[int]:
    try:
        found = [int(x) for x in text.split(",")]
    except ValueError:
        found = [-1]
    if any(x < 0 for x in found):
        wrong.append(f"{text!r}: give whole numbers with commas between them")
    return found


def measure(count: int, rate: int, sizes: Sequence[int], repeats: int) -> dict[int, float]:
    """Median seconds of a pull by this number of streams, by size in MiB.

    Raises:
      RuntimeError: an end failed, with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="lowcomm-transfer-") as folder, _places(rate) as places:
        parts = []
        for region, (before, host) in enumerate(places):
            settings = [folder, region, host, count, list(sizes), repeats]
            parts.append(([json.dumps(settings)], Path(folder) / f"output{region}", before))
        run_together(f"{count} streams", "experiments.bench.transfer", parts, _SECONDS_TO_END)
        taken = json.loads((Path(folder) / "taken").read_text())
    return {int(mib): statistics.median(seconds) for mib, seconds in taken.items()}


@contextlib.contextmanager
def _places(rate: int) -> Iterator[list[tuple[list[str], str]]]:
    """For each end: the words that run a command there, and its address."""
    if not rate:
        yield [([], "127.0.0.1")] * 2
        return
    with netem.link(rate) as places:
        yield list(zip(places, netem.ADDRESSES, strict=True))


def end(
    folder: str, region: int, host: str, count: int, sizes: Sequence[int], repeats: int
) -> None:
    """One of the two processes: region 0 serves, region 1 pulls."""
    streams.STREAMS = count
    one = exchange.peers(Path(folder, "meet").as_uri(), region, 2, "bench", address=f"{host}:0")
    one.join(60.0)
    transport, taken = one._context.transport, {mib: [] for mib in sizes}
    for mib in sizes:
        for repeat in range(1 + repeats):
            ready, done = (Path(folder) / f"{mib}.{repeat}.{x}" for x in ("ready", "done"))
            if region == 0:
                data = np.random.default_rng(repeat).bytes(2**20) * mib
                name = wire.digest(data)
                transport.put(name, data)
                del data
                _tell(ready, {"name": name})
                _told(done)
                transport.drop(name, shared=True)
            else:
                told = _told(ready)
                began = time.perf_counter()
                data = transport.get(told["name"], mib * 2**20, [0])
                if repeat:
                    taken[mib].append(time.perf_counter() - began)
                if wire.digest(data) != told["name"]:
                    raise AssertionError("what came was damaged")
                del data
                _tell(done, {})
    if region == 1:
        _tell(Path(folder) / "taken", taken)
    one.close(linger_s=0.0)


def _tell(place: Path, what: dict) -> None:
    half = place.with_suffix(".half")
    half.write_text(json.dumps(what))
    half.rename(place)


def _told(place: Path) -> dict:
    while not place.exists():
        time.sleep(_LOOK_S)
    return json.loads(place.read_text())


if __name__ == "__main__":
    end(*json.loads(sys.argv[1]))
