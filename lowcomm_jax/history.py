"""Events and metrics of a run's steps, fetched from devices when they are read."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.mesh.arrays import replicated
from lowcomm_jax.refused import is_unknown
from lowcomm_jax.rules.topology import Groups


def readable(values: Any) -> Any:
    """A pytree as every process of this program can read it (`arrays.replicated`)."""
    return values if jax.process_count() == 1 else replicated(values)


@dataclasses.dataclass
class Event:
    """One send or landing of a fragment, or something else that moves bytes between regions.

    Attributes:
      kind: `send`, `land`, `recover` (a learner that comes back copies a peer), or `route`
        (microbatches move along their paths, `sync.routed_steps`).
      step: inner step after which it was due; it happened there unless a job deferred it.
      fragment: index of the fragment; -1 where none is meant.
      key: name of the payload (`state.flight_key`); None for a landing without a payload.
      participants: bool `[R]`, regions that send, that land, or that copy.
      staleness: int64 `[R]`, landing: land step - send step; -1 for other regions. Of regions that
        send against the anchor they last received: since their landing before.
      nbytes: bytes of one region's payload; 0 in landings.
      bytes_sent, bytes_received: int64 `[R]`, bytes that the collective moves; 0 in landings.
      route: collective that the bytes were counted for.
      groups: send: the groups that exchange, None = one of all. Landing: the groups that the moved
        anchors were sent ahead to, those of the next round.
      ahead: landing: bytes of one region's anchor sent ahead; `bytes_sent` and `bytes_received`
        then count it.
      values: device arrays by name. A send has `delta_norm`, `left_out`, `weight`, and with
        `Engine(codec_error=True)` `codec_error` and `sent_share`, all `[R]`. A landing has
        `mean_norm` `[A]` or `[1]`, `update_norm` `[A]`, with gossip `pull_norm` `[R]`; others by
        method (`rank`, `seconds`, `correction_ratio`).
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

    @classmethod
    def widened(cls, event: Event, **fields: Any) -> Self:
        """An event of this class with the values of `event`, but for those in `fields`."""
        return cls(**{**vars(event), **fields})

    def sending_ahead(self, traffic: Traffic, groups: Groups) -> Event:
        """This landing, with the bytes of the moved anchors that are sent to the next groups."""
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
    """A send or landing of a channel; channels are numbered after the fragments in `fragment`.

    Its measurements are metrics of every step, `<channel>_left_out` and `<channel>_spread`.
    """

    channel: str = ""


def with_pace(metrics: dict[str, Any], pace: dict[str, np.ndarray], single: bool) -> dict[str, Any]:
    """Add to the metrics which regions made an inner step, where not all did.

    Args:
      pace: bool `[R, S]` by name: `active` (regions of different speed) or `away` (took no part in
        a gradient exchange).
      single: whether the metrics are of one step, `[R]`.
    """
    return {**metrics, **{k: mask[:, 0] if single else mask for k, mask in pace.items()}}


def common_names(named: Sequence[Collection[str]]) -> list[str]:
    """Names that all have, in the order of the first."""
    return [name for name in (named[0] if named else ()) if all(name in one for one in named)]


class NamedMetrics(abc.ABC):
    """Metrics by name: `names = list(record)`, `"loss" in record`, `record["loss"]`.

    Its length counts steps, not names.
    """

    @abc.abstractmethod
    def keys(self) -> list[str]:
        """Names of the metrics that every step has."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {len(self)} steps of {', '.join(self.keys()) or 'nothing'}>"
        )

    def _check(self, name: str) -> None:
        """Raise KeyError, naming the metrics, where steps have none of this name."""
        if len(self) and name not in self:
            known = is_unknown(name, self.keys())
            raise KeyError(f"metric {name!r} {known}; rows() gives one step after the other")


class History(NamedMetrics):
    """Metrics of consecutive steps; device arrays are fetched when rows are read."""

    def __init__(self, start: int):
        self.start = start
        self._chunks: list[tuple[int, dict[str, jax.Array], list[Event]]] = []

    def add(self, steps: int, metrics: dict[str, jax.Array], events: list[Event]) -> None:
        """Append a block: metric leaves `[R, S]` whose first `steps` columns are real."""
        self._chunks.append((steps, metrics, events))

    def __len__(self) -> int:
        return sum(steps for steps, _, _ in self._chunks)

    def keys(self) -> list[str]:
        return common_names([metrics for _, metrics, _ in self._chunks])

    def __getitem__(self, name: str) -> np.ndarray:
        """A metric of every step, `[steps, R]`."""
        self._check(name)
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
                # What a job deferred (`jobs.job_carrier`) stands where it was done.
                row = event.step if event.step > step else step + n
                by_step.setdefault(row, []).append(event.fetch())
            for i in range(n):
                step += 1
                row = {k: v[i] for k, v in fetched.items()}
                yield {"step": step, **row, "events": by_step.get(step, [])}
