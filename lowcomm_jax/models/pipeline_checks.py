"""What a pipeline refuses before any work starts, one line with its fix each."""

from __future__ import annotations

import typing
from typing import Any, Literal

Schedule = Literal["gpipe", "1f1b"]


def pipeline_problems(config: Any, count: int, microbatches: int) -> list[str]:
    """What keeps a model of `config` from running in `count` stages, with its fix."""
    found = []
    if config.layer_loop != "scan":
        found.append(
            f"layer_loop={config.layer_loop!r}: pipeline stages need layer_loop='scan', whose "
            "blocks are stacked"
        )
    if count > config.layers:
        found.append(f"{count} stages for {config.layers} blocks: use at most {config.layers}")
    if microbatches < 1:
        found.append(f"microbatches={microbatches}: at least 1 is needed")
    return found


def schedule_problems(schedule: str, routed: bool) -> list[str]:
    """A schedule that is unknown, or does not fit random routing."""
    if schedule not in typing.get_args(Schedule):
        return [f"schedule {schedule!r} is unknown: use {' or '.join(typing.get_args(Schedule))}"]
    if routed and schedule != "gpipe":
        return [
            f"random routing with {schedule}: its stages go back through different microbatches at "
            "the same time, and gradients would have to go different ways; use gpipe"
        ]
    return []
