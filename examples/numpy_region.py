"""One of two regions of a DiLoCo run in NumPy, by docs/wire.md, without an import of lowcomm_jax.

`LOWCOMM_SECRET=... python numpy_region.py FOLDER RUN REGION ROUNDS PERIOD RATE MOMENTUM`
checks signatures, digests and terms, and confirms what it holds. It leaves to others to judge who
is alive and to write commit records, cannot come back, and must count in the last exchange.
"""

import hashlib
import hmac
import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

FORMAT, EPOCH, JOB = 14, 1, 1  # the first job in this place, in the run's first epoch
FOLDER, RUN, SECRET = Path(*sys.argv[1:3]), sys.argv[2], os.environ["LOWCOMM_SECRET"].encode()
REGION, ROUNDS, PERIOD = map(int, sys.argv[3:6])
RATE, MOMENTUM = map(np.float32, sys.argv[6:8])
EXACT = {np.frexp(x)[0] for x in (RATE, MOMENTUM)} == {0.5}  # powers of two: equal bits everywhere
ODD = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)


def signed(key, body):
    mac = hmac.digest(SECRET, f"{FORMAT}\n{RUN}\n{key}\n".encode() + body, "sha256")
    return mac.hex().encode() + b"\n" + body


def write(key, data, over=False):
    """Write a file whole; False: what stands there was not to be written over."""
    (path := FOLDER / key).parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.__lock")
    new.write_bytes(data)
    try:
        (os.replace if over else os.link)(new, path)
    except FileExistsError:
        return False
    finally:
        new.unlink(missing_ok=True)
    return True


def first(slot):
    """The record of a slot, that of the lowest number whose signature holds; None: it has none."""
    for key in (f"{slot}.{number}" for number in itertools.count()):
        if not (FOLDER / key).exists():
            return None
        body = (data := (FOLDER / key).read_bytes()).partition(b"\n")[2]
        if hmac.compare_digest(data, signed(key, body)):
            return json.loads(body)


def create(slot, record):
    # A false record takes a number, and not the slot.
    for number in itertools.takewhile(lambda _: first(slot) is None, itertools.count()):
        write(f"{slot}.{number}", signed(f"{slot}.{number}", json.dumps(record).encode()))


def fetch(region, incarnation, payload):
    """The arrays of a payload; None: it is not there, damaged, or of another job."""
    data = path.read_bytes() if (path := FOLDER / "blob" / payload["digest"]).exists() else b""
    if hashlib.sha256(data).hexdigest() == payload["digest"]:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["lowcomm"])
        if [about[k] for k in ("run", "region", "incarnation")] == [RUN, region, incarnation]:
            return load(data)


def wait_for(look):
    until = time.monotonic() + 60
    while (found := look()) is None:
        assert time.monotonic() < until, "the other regions are gone"
        time.sleep(0.01)
    return found


def exchange(name, payload, terms):
    """Announce, confirm, and wait for the commit record; returns the arrays by region."""
    folder, held = f"round/{EPOCH}/{name}", {}
    create(f"{folder}/announce.{REGION}.{JOB}", {"payload": payload, "terms": terms})

    def look():
        names = [x.split(".") for x in os.listdir(FOLDER / folder) if x.count(".") == 3]
        for region, job in sorted((int(r), int(i)) for k, r, i, _ in names if k == "announce"):
            theirs = (first(f"{folder}/announce.{region}.{job}") or {}).get("payload")
            if theirs and fetch(region, job, theirs):
                held[str(region)] = theirs["digest"]  # of the newest job, which comes last
        if payload and (len(held) == 2 or "confirm" in [kind for kind, *_ in names]):
            create(f"{folder}/confirm.{REGION}.{JOB}", {"holds": held})  # all, or others wait
        return first(f"{folder}/commit")

    commit = wait_for(look)
    for region, theirs in commit["terms"].items():
        assert all(theirs.get(k, x) == x for k, x in terms.items()), f"{region} parted: {theirs}"
    named = {int(r): (x["incarnation"], x["payload"]) for r, x in commit["admitted"].items()}
    return {r: wait_for(lambda r=r: fetch(r, *named[r])) for r in sorted(named)}


def digest(anchor):
    """Two sums over all elements of one fragment, modulo 2^32, in hex."""
    total = np.zeros(2, np.uint32)
    for number, name in enumerate(sorted(anchor)):
        bits = anchor[name].reshape(-1).view(np.uint32)
        place = np.arange(bits.size, dtype=np.uint32) + np.uint32(number) * ODD[1]
        x = (bits + place * ODD[0]) * ODD[:, None]
        total += ((x ^ (x >> np.uint32(15))) * ODD[1]).sum(1, dtype=np.uint32)
    return "".join(f"{word:08x}" for word in total)


def beat(own):
    for own["counter"] in itertools.count(1):
        write(f"beat/{REGION}", signed(f"beat/{REGION}", json.dumps(own).encode()), over=True)
        time.sleep(0.2)


own = {"incarnation": JOB, "epoch": 0, "step": 0, "awaited": False, "leaving": False, "counter": 0}
assert write(f"born/{REGION}/{JOB}.0", b"taken\n"), "a job was in this place before"
threading.Thread(target=beat, args=(own,), daemon=True).start()
assert wait_for(lambda: first(f"epoch/{EPOCH}"))["roster"].get(str(REGION)) == JOB, "too late"
own |= {"epoch": EPOCH, "awaited": True}
x, y = np.random.default_rng(REGION).normal(size=(2, 16, 4)).astype(np.float32)
anchor = {"w": np.zeros((4, 4), np.float32), "b": np.zeros(4, np.float32)}
momentum, params = {k: np.zeros_like(a) for k, a in anchor.items()}, dict(anchor)
for number in range(1, ROUNDS + 1):
    for _ in range(PERIOD):
        error = np.float32(0.01) * (x @ params["w"] + params["b"] - y)
        params = {"w": params["w"] - x.T @ error, "b": params["b"] - error.sum(0)}
    sent = {f"payload/{k}": anchor[k] - params[k] for k in anchor} | {"weight": np.ones((), "f4")}
    about = {"run": RUN, "region": REGION, "incarnation": JOB, "serial": number}
    data = save(sent, {"lowcomm": json.dumps(about)})
    payload = {"digest": hashlib.sha256(data).hexdigest(), "nbytes": len(data)}
    write(f"blob/{payload['digest']}", data, over=True)
    terms = {"step": number * PERIOD, "fragment": 0, "level": 0}
    arrays = exchange(f"{number}", payload, terms | ({"anchor": digest(anchor)} if EXACT else {}))
    for name in anchor if arrays else ():  # the mean in the order of regions, then Nesterov's step
        total = sum((one[f"payload/{name}"] for one in arrays.values()), np.float32(0))
        mean = total * (np.float32(1) / np.float32(len(arrays)))
        momentum[name] = mean + MOMENTUM * momentum[name]
        anchor[name] = anchor[name] - RATE * (mean + MOMENTUM * momentum[name])
    params = dict(anchor) if REGION in arrays else params  # left out: it keeps its own values
    own |= {"step": number * PERIOD, "passed": str(number)}
exchange(f"{ROUNDS * PERIOD}.end", None, {"sends": ROUNDS})
print(json.dumps({name: one.tolist() for name, one in anchor.items()}))
own |= {"awaited": False, "leaving": True}
time.sleep(0.5)  # the next beat says so
