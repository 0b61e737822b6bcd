"""Skewed clocks: what regions do to one another never depends on the time of day."""

import pathlib
import re

import lowcomm_jax

TIME_OF_DAY = re.compile(r"time\.time(_ns)?\(|\b(now|utcnow|today|localtime|gmtime)\(")


def test_the_package_never_reads_the_time_of_day():
    assert TIME_OF_DAY.search("time.time()") and TIME_OF_DAY.search("datetime.now(UTC)")
    folder = pathlib.Path(lowcomm_jax.__file__).parent
    rooms = [
        folder / name
        for name in ("store", "rounds", "jobs", "recovery", "sync", "exchange", "mesh")
    ]
    files = [file for room in rooms for file in room.rglob("*.py")]
    found = [str(file) for file in files if TIME_OF_DAY.search(file.read_text(encoding="utf-8"))]
    assert len(files) > 50 and not found
