"""Participation as it was measured: what landings counted, where regions are separate jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def measure(steps: Sequence[dict[str, Any]]) -> None:
    """Replace the participation of steps by the share of the regions that was counted.

    A job that sends does not know yet whether the others will count it: its log has 1 for a payload
    that came too late, or to nobody. The payload's landing has what the commit record says.

    Args:
      steps: records of the jobs of a run, or of one of them; changed in place. Payloads that have
        not landed stay as they were sent, as do the records of a run in one process.
    """
    counted: dict[str, Sequence[bool]] = {}
    for step in steps:
        for event in step["events"]:
            if event["kind"] == "land" and "travel_seconds" in event:
                counted[event["key"]] = event["participants"]
    for step in steps if counted else ():
        sends = [e for e in step["events"] if e["kind"] == "send" and e["fragment"] >= 0]
        if sends:
            step["participation"] = float(np.mean([_share(send, counted) for send in sends]))


def _share(send: Mapping[str, Any], counted: Mapping[str, Sequence[bool]]) -> float:
    took = counted.get(send["key"], send["participants"])
    left_out = send.get("left_out") or [0.0] * len(took)
    return sum(bool(t) and not out for t, out in zip(took, left_out)) / len(took)
