"""Events and metrics of a run's steps, fetched from devices when they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from lowcomm_jax.exchange import Traffic
from lowcomm_jax.mesh.arrays import replicated
from lowcomm_jax.mesh.pipeline_paths import Hop
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
      trainer: of several, whose it is (`adloco.history`); None = there is one.
      channel: whose it is; its number in `fragment` follows those of the fragments, and its
        measurements are metrics of every step, `<channel>_left_out` and `<channel>_spread`.
      hops: route: transfers one after the other; `nbytes` is the most that a region sends.
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
    trainer: int | None = None
    channel: str | None = None
    hops: tuple[Hop, ...] | None = None

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
        """This landing, with the bytes of the moved anchors that are sent to the next groups."""
        return dataclasses.replace(
            self,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            groups=groups,
            ahead=traffic.nbytes,
        )

    def fetch(self) -> dict[str, Any]:
        """The event as plain Python numbers and lists; `trainer`, `channel`, `hops` if not None."""
        out = dataclasses.asdict(dataclasses.replace(self, values={}))
        del out["values"]
        for name in ("trainer", "channel", "hops"):
            if out[name] is None:
                del out[name]
        out |= {k: np.asarray(v) for k, v in self.values.items()}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in out.items()}


def with_presence(
    metrics: dict[str, Any], presence: dict[str, np.ndarray], single: bool
) -> dict[str, Any]:
    """Add to the metrics which regions made an inner step, where not all did.

    Args:
      presence: bool `[R, S]` by name: `active` (regions of different speed) or `away` (took no part
        in a gradient exchange).
      single: whether the metrics are of one step, `[R]`.
    """
    return {**metrics, **{k: mask[:, 0] if single else mask for k, mask in presence.items()}}


class Chunk(NamedTuple):
    """Consecutive steps of a history.

    Attributes:
      start: steps done before.
      steps: number of steps; 0 where events alone are told.
      metrics: leaves `[R, S]`, whose first `steps` columns are real.
      more: step -> what its row has besides.
      owed: the step in whose row events stand that were due before these steps: a job deferred
        them (`jobs.job_carrier`), and did them then.
    """

    start: int
    steps: int
    metrics: Mapping[str, Any]
    events: list[Event]
    more: Callable[[int], dict[str, Any]]
    owed: int


class History:
    """Metrics of steps by name: `names = list(record)`, `"loss" in record`, `record["loss"]`.

    Its length counts steps, not names. Device arrays are fetched when they are read.
    """

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []

    def add(
        self,
        start: int,
        steps: int,
        metrics: Mapping[str, Any],
        events: list[Event],
        more: Callable[[int], dict[str, Any]] = lambda step: {},
        owed: int | None = None,
    ) -> None:
        """Append a `Chunk`; `owed`: None = its last step."""
        last = start + steps if owed is None else owed
        self._chunks.append(Chunk(start, steps, metrics, events, more, last))

    def __len__(self) -> int:
        return sum(chunk.steps for chunk in self._chunks)

    def keys(self) -> list[str]:
        """Names of the metrics that every step has."""
        named = [chunk.metrics for chunk in self._chunks if chunk.steps]
        return [name for name in (named[0] if named else ()) if all(name in one for one in named)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __repr__(self) -> str:
        return f"<History: {len(self)} steps of {', '.join(self.keys()) or 'nothing'}>"

    def __getitem__(self, name: str) -> np.ndarray:
        """A metric of every step, `[steps, R]`."""
        if len(self) and name not in self:
            known = is_unknown(name, self.keys())
            raise KeyError(f"metric {name!r} {known}; rows() gives one step after the other")
        parts = [np.asarray(c.metrics[name])[:, : c.steps].T for c in self._chunks if c.steps]
        return np.concatenate(parts) if parts else np.zeros((0, 0), np.float32)

    @property
    def events(self) -> list[Event]:
        return [event for chunk in self._chunks for event in chunk.events]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per step: `step`, each metric as a list over regions, and its `events`."""
        for start, n, metrics, events, more, owed in self._chunks:
            fetched = {k: np.asarray(v)[:, :n].T.tolist() for k, v in metrics.items()}
            by_step: dict[int, list] = {}
            for event in events:
                row = event.step if event.step > start else owed
                by_step.setdefault(row, []).append(event.fetch())
            for i, step in enumerate(range(start + 1, start + n + 1)):
                row = {k: v[i] for k, v in fetched.items()}
                yield {"step": step, **row, "events": by_step.get(step, []), **more(step)}
