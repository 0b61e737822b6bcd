"""Write a run's records: always metrics.jsonl; TensorBoard, W&B and Prometheus if asked for."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.cli import RefusedError
from experiments.metrics import MEASURED, MetricsLog, read_records
from experiments.report.export_table import numbers
from experiments.workdir import METRICS, write_whole
from lowcomm_jax.mesh.leader import leader

if TYPE_CHECKING:
    from experiments.train.job import Job

# In the work directory: a folder, and a file.
TENSORBOARD, WANDB_ID = "tensorboard", "wandb_id"


class NoLog:
    """The log of a process that does not write, since the first one of its job does."""

    begun, newest, eval_set = True, None, None

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_log(job: Job, step: int) -> MetricsLog | NoLog:
    """Open all writers of a run's records.

    Args:
      step: the run goes on after this step, and writers that can drop the records of later ones;
        -1 = the run starts.
    """
    if not leader().leads:
        return NoLog()
    log, settings = MetricsLog(job.workdir / METRICS, step), job.config["log"]
    if settings["tensorboard"]:
        log.writers.append(_TensorBoard(job.workdir / TENSORBOARD, step, job.here))
    if settings["wandb"]:
        kept = read_records(job.workdir / METRICS)
        log.writers.append(_WeightsAndBiases(settings["wandb"], job, kept))
    if settings["prometheus"]:
        # Jobs of several regions may share a machine.
        log.writers.append(_Prometheus(settings["prometheus"] + job.here[0], job.here))
    return log


def _scalars(record: Mapping[str, Any], here: Sequence[int]) -> dict[str, float]:
    """`eval/anchor`, `step/loss/region0`, ...: every number of a record by name.

    Args:
      here: numbers of the regions of this job.
    """
    kind = record["kind"]
    named = {
        f"{kind}/{metric}" + ("" if region == "" else f"/region{region}"): value
        for region, metric, value in numbers(record, here)
    }
    return {name: float(value) for name, value in named.items() if value is not None}


class _TensorBoard:
    def __init__(self, folder: Path, step: int, here: Sequence[int]):
        from tensorboardX import SummaryWriter

        self._here = here
        # Event files cannot be cut: the reader is told to forget what comes after.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step >= 0 else None)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in _scalars(record, self._here).items():
            self._writer.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One run of the service a folder, under an id that is made once and kept there.

    The service takes each step once: those that a continued run repeats are not sent. A kill may
    have taken steps from it that `metrics.jsonl` has. They are sent again at the next start.
    Evaluations have an axis of their own, `eval/step`: one that a restart owes comes behind the
    steps that the service has.
    """

    def __init__(self, project: str, job: Job, kept: Iterable[Mapping[str, Any]]):
        """`kept`: records of earlier starts, after which the run goes on."""
        import wandb

        self._here = job.here
        self._run = wandb.init(
            project=project,
            dir=str(job.workdir),
            id=_kept_id(job.workdir / WANDB_ID),
            name=job.workdir.name,
            resume="allow",
            config=dict(job.config),
        )
        self._run.define_metric("eval/*", step_metric="eval/step")
        self._missing = self._run.step  # the first step that it does not have
        for record in kept:
            if record["kind"] in MEASURED and record["step"] >= self._missing:
                self.write(record)

    def write(self, record: Mapping[str, Any]) -> None:
        row, step = _scalars(record, self._here), record["step"]
        if record["kind"] == "eval":
            row["eval/step"] = step
            step = max(step, self._missing)
        if step >= self._missing:
            self._run.log(row, step=step)

    def sync(self) -> None:
        """Nothing: what is lost is sent again."""

    def close(self) -> None:
        self._run.finish()


def _kept_id(file: Path) -> str:
    """The id in a file, which is made where there is none."""
    if not file.is_file():
        write_whole(file, secrets.token_hex(8) + "\n")
    return file.read_text(encoding="utf-8").strip()


class _Prometheus:
    """The newest value of every number as a gauge, `lowcomm_step_loss{region="0"}`, over HTTP.

    Raises:
      RefusedError: the port is taken.
    """

    def __init__(self, port: int, here: Sequence[int]):
        import prometheus_client

        self._here = here
        self._gauge = prometheus_client.Gauge
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            started = prometheus_client.start_http_server(port, registry=self._registry)
        except OSError as error:
            raise RefusedError([f"log.prometheus: port {port}: {error}"]) from error
        self._server, self._thread = started

    def write(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        self._set(f"lowcomm_{kind}_number", "", record["step"])
        for region, metric, value in numbers(record, self._here):
            if value is not None:
                self._set(f"lowcomm_{kind}_{metric}", str(region), float(value))

    def _set(self, name: str, region: str, value: float) -> None:
        name = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if name not in self._gauges:
            about = "newest value; region is empty where it is one of all"
            self._gauges[name] = self._gauge(name, about, ["region"], registry=self._registry)
        self._gauges[name].labels(region).set(value)

    def sync(self) -> None:
        """Nothing: a gauge has the newest value only."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
