"""Refusals: channels that do not fit their method, or one another."""

from __future__ import annotations

from typing import Any

from lowcomm_jax.channels.source import PARAMS


def channel_violations(method: Any) -> list[str]:
    """Every setting of a `Method`'s channels that cannot work, one line with its fix each."""
    if not method.channels:
        idle = "the schedule never sends and there are no channels: nothing is exchanged; add one"
        return [] if method.has_anchor else [idle]
    found = [line for channel in method.channels for line in channel.violations()]
    found += _twice(method)
    for what, unfit in _unfit(method).items():
        if unfit:
            found.append(f"{method.name} has channels: {what}")
    if not method.has_anchor:
        unused = {"landing": method.landing, "codec": method.codec, "outer": method.outer}
        found += [
            f"{name}: {method.name} has no main exchange, so it would have no effect; leave it out"
            for name, value in unused.items()
            if value is not None
        ]
    return found


def _unfit(method: Any) -> dict[str, bool]:
    """What cannot be combined with channels, with its fix -> whether the method has it."""
    late = any(c.delay and c.source == PARAMS for c in method.channels)
    return {
        "gossiping regions never meet all; leave topology out": method.topology is not None,
        "regions that exchange gradients are equal; use signal='progress'": (
            method.signal == "gradient"
        ),
        "regions at a pace of their own make no step at times; use another schedule": (
            method.schedule.uneven
        ),
        "batches that grow and trainers are not supported; leave them out": method.adapts,
        "with several fragments an anchor would make part of a late payload stale; use one, or a "
        "delay of 0": late and method.schedule.fragments > 1,
    }


def _twice(method: Any) -> list[str]:
    found = []
    for what in ("name", "source"):
        values = [getattr(channel, what) for channel in method.channels]
        found += [
            f"channels: {what}={value!r} stands in {values.count(value)} of them; give each its own"
            for value in dict.fromkeys(values)
            if values.count(value) > 1
        ]
    return found
