"""Save and restore a clock, transfers in flight included, as plain JSON-able data."""

import ast
from typing import Any

import numpy as np

from lowcomm_jax.network.clock import VirtualClock
from lowcomm_jax.network.sharing import Transfer
from lowcomm_jax.network.transit import Flight, Payload

ARRAYS = ("now_R", "peers_R", "exposed_R", "absent_R")


def clock_state(clock: VirtualClock) -> dict[str, Any]:
    """Give everything a clock needs to go on as if it had never stopped (bars of the timeline
    excepted).

    Keys and labels must be ints, strings or tuples of those.
    """
    transit = clock.transit
    return {
        "seed": clock.seed,
        "sends": transit.sends,
        "arrays": {name: getattr(clock, name).tolist() for name in ARRAYS},
        "peak": transit.peak_R.tolist(),
        "used_links": sorted(list(pair) for pair in transit.used_links),
        "payloads": [
            {
                "key": repr(key),
                "label": repr(payload.label),
                "landing": payload.landing,
                "sent": [_flight_row(f) for f in payload.sent],
                "heard": [_flight_row(f) for f in payload.heard],
            }
            for key, payload in transit.payloads.items()
        ],
        "owed": [_flight_row(f) for f in transit.owed],
        "transfers": [
            _transfer_row(transit.fabric.resolve(t.number)) for t in transit.fabric.transfers()
        ],
        "booked": [[repr(entry), times] for entry, times in clock.ledger.booked.items()],
        "analytic": [[repr(key), value] for key, value in clock.ledger.analytic.items()],
        "control": clock.ledger.control_R.tolist(),
    }


def restore_clock(clock: VirtualClock, state: dict[str, Any]) -> None:
    """Put a freshly built clock (same network) into a saved state, in place.

    Raises:
        ValueError: the clock was used before, or the state is of another number of regions or
            another seed.
    """
    found, transit = [], clock.transit
    if transit.sends or clock.now_R.any():
        found.append("the clock was already used: restore into a new one")
    if len(state["arrays"]["now_R"]) != clock.network.size:
        found.append(
            f"saved with {len(state['arrays']['now_R'])} regions, the network has "
            f"{clock.network.size}"
        )
    if state["seed"] != clock.seed:
        found.append(
            f"saved with seed {state['seed']}, the clock has {clock.seed}: use the saved one"
        )
    if found:
        raise ValueError("cannot restore the clock: " + "; ".join(found))
    for name in ARRAYS:
        getattr(clock, name)[:] = state["arrays"][name]
    transit.sends = state["sends"]
    transit.peak_R[:] = state["peak"]
    transit.used_links = {(a, b) for a, b in state["used_links"]}
    for row in state["transfers"]:
        transit.fabric.add(_transfer(row))
    for row in state["payloads"]:
        label, sent, heard = ast.literal_eval(row["label"]), row["sent"], row["heard"]
        flights = [_flight(f) for f in sent], [_flight(f) for f in heard]
        transit.payloads[ast.literal_eval(row["key"])] = Payload(label, *flights, row["landing"])
    transit.owed = [_flight(row) for row in state["owed"]]
    clock.ledger.booked.update({ast.literal_eval(entry): times for entry, times in state["booked"]})
    clock.ledger.analytic.update({ast.literal_eval(key): value for key, value in state["analytic"]})
    clock.ledger.control_R[:] = state["control"]


def _flight_row(flight: Flight) -> dict[str, Any]:
    return {
        "key": repr(flight.key),
        "number": flight.number,
        "members": list(flight.members),
        "start_s": flight.start_s,
        "latency": flight.latency_M.tolist(),
        "share": flight.share_M.tolist(),
        "waiting": flight.waiting_M.tolist(),
    }


def _flight(row: dict[str, Any]) -> Flight:
    return Flight(
        ast.literal_eval(row["key"]),
        row["number"],
        tuple(row["members"]),
        row["start_s"],
        np.array(row["latency"], float),
        np.array(row["share"], float),
        np.array(row["waiting"], bool),
    )


def _transfer_row(transfer: Transfer) -> dict[str, Any]:
    return {
        "number": transfer.number,
        "members": list(transfer.members),
        "flow_s": transfer.flow_s,
        "volume_s": transfer.volume_s,
        "usage": [[list(resource), share] for resource, share in transfer.usage.items()],
        "rate": transfer.rate_M.tolist(),
    }


def _transfer(row: dict[str, Any]) -> Transfer:
    usage = {(kind, a, b): share for (kind, a, b), share in row["usage"]}
    return Transfer(
        row["number"],
        tuple(row["members"]),
        row["flow_s"],
        row["volume_s"],
        usage,
        np.array(row["rate"], float),
    )
