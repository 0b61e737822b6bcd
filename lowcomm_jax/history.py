"""What happened, as numbers: events and per-step metrics, fetched from devices lazily."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.mesh.arrays import replicated
from lowcomm_jax.topology.gossip import Groups


def readable(values: Any) -> Any:
    """A pytree as every process of this program can read it (`arrays.replicated`)."""
    return values if jax.process_count() == 1 else replicated(values)


@dataclasses.dataclass
class Event:
    """One send or landing of a fragment, or what a learner copies that comes back.

    Attributes:
      kind: `send`, `land`, or `recover`, which concerns no fragment (-1) and the one learner.
      step: inner step after which it was due, which is when it happened unless a job deferred it.
      fragment: index of the fragment.
      key: name of the payload (`state.flight_key`); None for a landing of which nothing was due.
      participants: bool `[R]`, the regions it concerns.
      staleness: int64 `[R]`, landing: land step - send step; -1 for regions it does not concern.
      nbytes: bytes of one region's payload; 0 in landings.
      bytes_sent, bytes_received: int64 `[R]`, what the collective moves; 0 in landings.
      route: collective the bytes were counted for.
      groups: send: the groups that exchange, None = one of all. Landing: the groups that the moved
        anchors were sent ahead to, those of the next round.
      ahead: landing: bytes of one region's anchor sent ahead; `bytes_sent` and `bytes_received`
        then count it.
      values: fp32 device arrays: send `delta_norm` `[R]`, `left_out` `[R]`, `weight` `[R]`, with a
        codec `codec_error` `[R]`;
        landing `mean_norm` `[A]` or `[1]`, `update_norm` `[A]`, with gossip `pull_norm` `[R]`.
    """

    kind: str
    step: int
    fragment: int
    key: str | None
    participants: np.ndarray
    staleness: np.ndarray
    nbytes: int
    bytes_sent: np.ndarray
    bytes_received: np.ndarray
    route: str
    values: dict[str, Any]
    groups: Groups | None = None
    ahead: int = 0
    trainer = None  # no field: events of a single trainer do not mention it
    channel = None  # nor those of the main exchange a channel

    @classmethod
    def of_send(
        cls, step: int, fragment: int, key: str, mask, traffic: Traffic, values, groups=None
    ) -> Event:
        never = np.full(mask.size, -1, np.int64)
        moved = (traffic.nbytes, traffic.sent, traffic.received, traffic.route)
        return cls(
            "send", step, fragment, key, mask.copy(), never, *moved, readable(values), groups
        )

    @classmethod
    def of_landing(
        cls, step: int, fragment: int, key: str | None, lands: np.ndarray, staleness, values
    ) -> Event:
        stale = np.where(lands, staleness, -1)
        zeros = np.zeros(lands.size, np.int64)
        nothing = (0, zeros, zeros, "")
        return cls("land", step, fragment, key, lands.copy(), stale, *nothing, readable(values))

    def sending_ahead(self, traffic: Traffic, groups: Groups) -> Event:
        """This landing, followed at once by the moved anchors' way to the next groups."""
        return dataclasses.replace(
            self,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            groups=groups,
            ahead=traffic.nbytes,
        )

    def fetch(self) -> dict[str, Any]:
        """The event as plain Python numbers and lists."""
        out = dataclasses.asdict(dataclasses.replace(self, values={}))
        del out["values"]
        out |= {k: np.asarray(v) for k, v in self.values.items()}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in out.items()}


@dataclasses.dataclass
class ChannelEvent(Event):
    """A send or landing of a channel; `fragment` is its number behind those of the fragments.

    What was measured stands in the metrics of every step, `<channel>_left_out` and `_spread`.
    """

    channel: str = ""

    @classmethod
    def of(cls, event: Event, channel: str) -> ChannelEvent:
        fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
        return cls(**fields, channel=channel)


def with_pace(metrics: dict[str, Any], pace: dict[str, np.ndarray], single: bool) -> dict[str, Any]:
    """Add who made an inner step, where not every region did.

    Args:
      pace: bool `[R, S]`: `active` (uneven regions) or `away` (left out of a gradient exchange).
      single: whether the metrics are of one step, `[R]`.
    """
    return {**metrics, **{k: mask[:, 0] if single else mask for k, mask in pace.items()}}


class History:
    """Metrics of consecutive steps; device arrays are fetched when rows are read."""

    def __init__(self, start: int):
        self.start = start
        self._chunks: list[tuple[int, dict[str, jax.Array], list[Event]]] = []

    def add(self, steps: int, metrics: dict[str, jax.Array], events: list[Event]) -> None:
        """Append a block: metric leaves `[R, S]` whose first `steps` columns are real."""
        self._chunks.append((steps, metrics, events))

    def __len__(self) -> int:
        return sum(steps for steps, _, _ in self._chunks)

    def __getitem__(self, name: str) -> np.ndarray:
        """A metric of every step, `[steps, R]`."""
        parts = [np.asarray(metrics[name])[:, :n].T for n, metrics, _ in self._chunks]
        return np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)

    @property
    def events(self) -> list[Event]:
        return [event for _, _, events in self._chunks for event in events]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per step: `step`, each metric as a list over regions, and its `events`."""
        step = self.start
        for n, metrics, events in self._chunks:
            fetched = {k: np.asarray(v)[:, :n].T.tolist() for k, v in metrics.items()}
            by_step: dict[int, list] = {}
            for event in events:
                # What a job deferred (`runtime.job_loop`) stands where it was done.
                row = event.step if event.step > step else step + n
                by_step.setdefault(row, []).append(event.fetch())
            for i in range(n):
                step += 1
                row = {k: v[i] for k, v in fetched.items()}
                yield {"step": step, **row, "events": by_step.get(step, [])}
