"""From a checked `Job` to a `Run`: data, model, engine, exchange, learning rates."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from experiments.cli import RefusedError, made_or_refused, problems_of, refuse_any
from experiments.faults.fault_hooks import ScriptedFaults
from experiments.progress import Work
from experiments.regions import jobs
from experiments.regions.transports import transport
from experiments.train.evaluation import Evaluator
from experiments.train.job import Job, make_engine, make_model
from experiments.train.model import with_vocabulary
from experiments.train.way import Way, fastest_way
from experiments.workdir import of_regions
from lowcomm_jax import AdaptiveEngine, Engine
from lowcomm_jax.checkpoint.load import dotted
from lowcomm_jax.data import EvalData, Tokenizer, TrainData, load
from lowcomm_jax.models import Pipeline, Trainable
from lowcomm_jax.models.protocol import abstract_params
from lowcomm_jax.optimizers import learning_rate
from lowcomm_jax.params.layout import make_layout
from lowcomm_jax.rounds.connect import store
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.setup import DescribedExchange
from lowcomm_jax.store.timing import Timing

CHUNK = 4096  # learning rates worked out at once


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, ready to train.

    Attributes:
      model: in pipeline stages where the mesh has some.
      exchange: with the other jobs; None where all regions are in this one, and for a run that is
        not to train.
      way: how the model is computed.
      fault_hooks: faults that this job injects into itself; None = none.
    """

    job: Job
    model: Trainable
    engine: Engine | AdaptiveEngine
    exchange: RemoteExchange | None
    data: TrainData
    evaluation: EvalData
    tokenizer: Tokenizer
    way: Way
    fault_hooks: ScriptedFaults | None = None

    def rates(self, steps: np.ndarray) -> np.ndarray:
        """Learning rates of (nominal) steps, counted from 0, float."""
        first, last = int(steps.min()) // CHUNK, int(steps.max()) // CHUNK
        known = np.concatenate([self._rates(k) for k in range(first, last + 1)])
        return known[steps - first * CHUNK]

    @functools.cached_property
    def _rates(self) -> Callable[[int], np.ndarray]:
        rate = jax.jit(learning_rate(self.job.inner, self.job.steps))

        @functools.lru_cache(maxsize=4)
        def of_chunk(k: int) -> np.ndarray:
            return np.asarray(rate(np.arange(k * CHUNK, (k + 1) * CHUNK)))

        return of_chunk

    def close(self, needed: bool = True) -> None:
        """Leave the other jobs.

        Args:
          needed: whether to wait until they have what only this job can give them.
        """
        if self.exchange is not None:
            self.exchange.close(**({} if needed else {"linger_s": 0.0}))

    @property
    def whole(self) -> Trainable:
        """The model in one piece."""
        return self.model.model if isinstance(self.model, Pipeline) else self.model

    def in_stages(self, params: Any) -> Any:
        """Parameters of the model in one piece, as `model` takes them."""
        return self.model.layout.cut(params) if isinstance(self.model, Pipeline) else params

    def in_one_piece(self, params: Any) -> Any:
        """Inverse of `in_stages`."""
        return self.model.layout.join(params) if isinstance(self.model, Pipeline) else params

    def evaluator(self) -> Evaluator:
        """The run's evaluator; puts its sequences on the devices."""
        settings = {k: x for k, x in self.job.config["eval"].items() if k != "every"}
        return Evaluator(self.model, self.evaluation, self.job.mesh, **settings)


def assemble(job: Job, quiet: bool = False, trains: bool = False) -> Run:
    """Read the corpus and build the parts.

    Args:
      quiet: show no progress of the corpus.
      trains: whether the run is to train: only then is the exchange with the other jobs opened, and
        the fastest way to compute the model chosen (`way.fastest_way`).

    Raises:
      RefusedError: problems that only the corpus, the tokenizer or the engine can show.
    """
    with Work("data", quiet=quiet) as work:
        loaded, problems = problems_of(lambda: load(job.data, progress=work.at))
    # What names a field is that of its section; the rest is about the corpus itself.
    problems = [("data." if re.match(r"\w+=", line) else "data: ") + line for line in problems]
    refuse_any(problems)
    train, evaluation, tokenizer = loaded
    described = job.model
    if not job.vocab_settled:
        described = with_vocabulary(described, tokenizer.vocab_size)
    vocabulary = described.vocab_size
    if vocabulary is not None and vocabulary < tokenizer.size:
        fix = f"use at least {tokenizer.size}, or leave it out"
        raise RefusedError(
            [f"model.vocab_size={vocabulary} is too small for {tokenizer.name}: {fix}"]
        )
    fault_hooks, exchange, way = None, None, Way(described)
    if trains:
        if job.faults and jobs.is_separate_job(job.config):
            fault_hooks = ScriptedFaults(job.faults, job.config["region"])
        exchange = made_or_refused(lambda: open_exchange(job, train, fault_hooks), "cannot start")
        way = made_or_refused(lambda: fastest_way(job, described, exchange), "cannot start")
    model = make_model(job, way.model)
    between = exchange or jobs.described(job.config)
    engine = made_or_refused(lambda: _engine_that_fits(job, model, between), "cannot start")
    return Run(
        job=job,
        model=model,
        engine=engine,
        exchange=exchange,
        data=train,
        evaluation=evaluation,
        tokenizer=tokenizer,
        way=way,
        fault_hooks=fault_hooks,
    )


def _engine_that_fits(
    job: Job, model: Trainable, exchange: RemoteExchange | DescribedExchange | None
) -> Engine | AdaptiveEngine:
    """The engine, once its programs for this model can be made (nothing is compiled)."""
    engine = make_engine(job, model, exchange)
    plain = engine.plain
    plain.programs_for(make_layout(abstract_params(model), plain.setup.roles))
    return engine


def open_exchange(
    job: Job, data: TrainData, fault_hooks: ScriptedFaults | None = None
) -> RemoteExchange | None:
    """Open the exchange of a checked job; it has not joined the others yet. None on a mesh.

    Args:
      fault_hooks: faults that this job injects into its own payloads; None = none.

    Raises:
      ValueError: the rendezvous, the secret or the transport cannot be used.
    """
    fields = job.config
    if not jobs.is_separate_job(fields):
        return None
    made = store(
        fields["rendezvous"],
        fields["region"],
        fields["regions"],
        run_id(fields, data.identity),
        secret=fields["secret"],
        timing=Timing.between(fields["rendezvous"], deadline_s=fields["deadline_s"]),
        heal=fields["heal"],
        identity=identity(fields, data.summary),
        fault_hooks=fault_hooks,
        transport=transport(fields),
    )
    made.keep_more(job.method.schedule.fragments)
    return made


def identity(fields: Mapping[str, Any], texts: Mapping[str, Any]) -> dict[str, str]:
    """What the id of a run stands for: what its jobs have in common, by dotted names.

    Args:
      texts: `TrainData.summary`.
    """
    found = {name: str(value) for name, value in dotted(of_regions(fields, "")).items()}
    del found["corpus"]
    for name in ("corpus", "tokenizer"):
        found[f"data.{name}"] += f" (digest {texts[f'{name}_digest'][:12]})"
    return found


def run_id(fields: Mapping[str, Any], corpus: str) -> str:
    """Digest of what all jobs of a run have in common; a job with another meets none of them."""
    text = json.dumps(of_regions(fields, corpus), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
