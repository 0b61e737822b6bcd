"""Train a model in several regions.

    python -m experiments train --config=configs/diloco.py --config.steps=2000 --workdir=runs/a

Every field of experiments/config.py can be overridden with --config.FIELD=VALUE. The same command
continues a run that was stopped.

- `--help` with a `--config` lists that config's fields and values.
- `--print-config` shows the checked config and what follows from it, and trains nothing.
- SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1 or SIGUSR2 finishes the step, saves, and exits with
  code 75. One of several jobs saves, then goes on to a step at which all of them stop.
- Exit code 3: no region learnt anything for 50 steps, since numbers were not finite. 74: a
  checkpoint could not be written. 2: refused, with every problem listed. 1: a job that is one
  region came to the end, and the others had not counted its last three exchanges.

One program over several hosts: start the same command once a process, under Slurm, Kubernetes,
mpirun or on TPU hosts; or by hand with --coordinator=HOST:PORT --process=I --processes=N.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from experiments.cli import (
    NO_CONFIG,
    EndedError,
    Flags,
    RefusedError,
    bare_name,
    config_of,
    lines_of,
    listing,
    parse_flags,
    refuse_any,
    show_help,
    split_config,
)
from experiments.config import plain
from experiments.faults import origin
from experiments.faults.landings import Landings
from experiments.metrics import read_records
from experiments.progress import (
    Display,
    open_display,
    plain_console,
    say,
    size,
    validation_documents,
)
from experiments.report import main as report
from experiments.train import compile_cache, devices, fields, processes
from experiments.train.assemble import Run, assemble
from experiments.train.disk import NotSavedError, is_full
from experiments.train.drivers import draw
from experiments.train.evaluation import Evaluator
from experiments.train.header import changes, header, text, trained_and_sent
from experiments.train.job import Job
from experiments.train.loop import NotCountedError, TrainingLoop, best_by
from experiments.train.records import continue_counts
from experiments.train.resolve import fit_warm_up, refuse_unreadable, resolve
from experiments.train.starting import starting_params
from experiments.train.writers import open_log
from experiments.workdir import (
    CHECKPOINTS,
    METRICS,
    OccupiedError,
    differences,
    learnt,
    occupied,
    occupied_problems,
    other_folder,
    write_config,
)
from lowcomm_jax.checkpoint import Checkpoints, DamagedError, Restored
from lowcomm_jax.interrupt import EXIT_INTERRUPTED, Interrupt, InterruptedBeforeError, raised
from lowcomm_jax.mesh.leader import ProcessLostError, leader
from lowcomm_jax.mesh.stages import bubble
from lowcomm_jax.models import Pipeline
from lowcomm_jax.models.protocol import abstract_params, param_count
from lowcomm_jax.recovery import rejoin
from lowcomm_jax.recovery.precompile import precompile
from lowcomm_jax.rounds.remote import RemoteExchange
from lowcomm_jax.state.train_state import rounds_landed
from lowcomm_jax.store.errors import (
    Lost,
    Parted,
    Rejected,
    StoreUnavailable,
    Superseded,
    Unreadable,
)

FEW_DOCUMENTS = 5
"""With fewer validation documents than these a run warns at its start."""


def main(argv: Sequence[str]) -> int:
    """Train as the command line says; returns the exit code."""
    path, overrides, others = split_config(argv)
    options = Flags()
    options.text("workdir", None, "folder of the run (default: runs/ and the name of the config)")
    options.text(
        "compile_cache",
        None,
        "folder of compiled programs, or off (default: xla in the cache folder)",
    )
    options.switch("quiet", "print no progress, only the report at the end")
    options.whole("processes", None, "processes of this program, each with devices of its own")
    options.whole("process", None, "number of this process, from 0")
    options.text("coordinator", None, "HOST:PORT where process 0 listens")
    options.switch(
        "print_config", "show the checked config and what follows from it; train nothing"
    )
    values = options.values
    rest = parse_flags("train", others, values, config=path)
    if values.help:
        show_help(values, __doc__)
        shown, problems = config_of("train", path or "diloco", overrides)
        refuse_any(problems, "train")
        refuse_unreadable(shown)
        fit_warm_up(shown, overrides)
        shown = plain(shown)
        print("\n" + listing(shown, fields.descriptions(shown["method"], shown["model"])))
        return 0
    if path is None:
        raise RefusedError([NO_CONFIG], "train")
    config, problems = config_of("train", path, [*overrides, *_of_process(values)], rest)
    refuse_unreadable(config, problems)
    shortened = fit_warm_up(config, overrides)
    workdir = values.workdir or f"runs/{bare_name(path)}"
    settings = plain(config)
    if not values.print_config:
        devices.take_memory()
        processes.start(settings)
    try:
        job = resolve(config, workdir)
    except RefusedError as error:
        job, problems = None, problems + error.problems
    try:
        processes.refuse(problems, settings)
        if values.print_config:
            print(fields.resolved(job), end="")
            return 0
        compile_cache.enable(values.compile_cache)
        console = plain_console(quiet=not leader().leads)
        if shortened and not values.quiet:
            console.print(shortened, highlight=False, soft_wrap=True)
        complete = train_and_heal(job, console, values.quiet or not leader().leads)
    except ProcessLostError as error:
        processes.end(error)
    except (Parted, Rejected, Superseded, Unreadable) as error:
        # What this region found, and what its user does about it: where it was found is no help.
        raise EndedError(str(error)) from error
    except Exception as error:  # a full disk comes as every type, from whatever writes
        if is_full(error) and not isinstance(error, NotSavedError):
            raise NotSavedError(str(error)) from error
        raise
    if not complete:
        console.print(f"interrupted and saved; run the same command to continue ({job.workdir})")
        return EXIT_INTERRUPTED
    if len(job.here) < job.regions:
        console.print(f"region {job.here[0]} is done ({job.workdir})", highlight=False)
    else:
        report.show([job.workdir], console)
    return 0


def _of_process(values) -> list[tuple[str, str]]:
    """The fields of the config that `--processes`, `--process` and `--coordinator` set."""
    names = ("processes", "process", "coordinator")
    return [(name, str(values[name].value)) for name in names if values[name].value is not None]


def train_and_heal(job: Job, console: Console, quiet: bool = False) -> bool:
    """`train`, again and again while the region has to rejoin with the others' state.

    A region rejoins where its own state can no longer be used. Its anchor differs from the others',
    or it was cut off for so long that a payload which it must land is gone.
    """
    while True:
        try:
            return train(job, console, quiet)
        except (Lost, Parted) as error:
            if not getattr(error, "heals", True):
                raise
            say(console, f"{error}; it comes back")


def train(job: Job, console: Console, quiet: bool = False, display: Display | None = None) -> bool:
    """Train a job from its start or its newest checkpoint; returns whether it is complete.

    Args:
      quiet: print no progress.
      display: shows the progress instead of the console, which then prints warnings only.

    Raises:
      OccupiedError: another process trains in the folder.
      RefusedError: problems that only the corpus, the weights or the checkpoints can show.
    """
    quiet = quiet or display is not None
    # Before it says that it reads the corpus; the folder is taken after that is checked.
    busy = leader().broadcast_from_leader("folder", lambda: occupied_problems([job.workdir]))
    if busy:
        raise OccupiedError(busy)
    if job.mesh.shape["stage"] > job.microbatches:
        say(console, f"warning: {_idle(job)}")
    if not quiet:
        processes.describe(console, job.config)
        console.print(f"reading the corpus {job.data.corpus} ...", highlight=False)
    with leader().together():
        run = assemble(job, quiet, trains=True)
        processes.require_equal(corpus=run.data.identity)
    keep = job.config["checkpoint"]
    checkpoints = Checkpoints(
        job.workdir / CHECKPOINTS,
        keep_last=keep["keep_last"],
        keep_best=best_by(job.config) if keep["keep_best"] else None,
    )
    try:
        with contextlib.ExitStack() as held, contextlib.closing(checkpoints), _closing(run):
            with leader().together():
                if leader().leads:
                    held.enter_context(occupied(job.workdir))
            return _train(run, checkpoints, console, quiet, display, held)
    except _LostAndSaved:
        return False


class _LostAndSaved(Lost):
    """The others went on without this region, after a signal: its state is saved."""


def _train(
    run: Run,
    checkpoints: Checkpoints,
    console: Console,
    quiet: bool,
    display: Display | None,
    held: contextlib.ExitStack,
) -> bool:
    """Restore or start a run, join the other regions, and train; whether the run is complete.

    Args:
      held: signals are, until everything is written and closed.
    """
    job = run.job
    with leader().together():
        restored = _restore(run, checkpoints)
        ended = restored is not None and restored.extra["ended"] is not None
        if ended and leader().broadcast_from_leader("judged", lambda: judged(job.workdir)):
            if restored.extra["ended"].get("uncounted"):
                raise NotCountedError(restored.step)
            console.print(f"{job.workdir} is complete (step {restored.step})", highlight=False)
            return True
        if leader().leads:
            write_config(job.workdir, job.config)
            run.way.store(job.workdir)
        if not quiet:
            describe(run, restored, console)
        state = run.engine.init(starting_params(run)) if restored is None else restored.state
        evaluator = run.evaluator()
        try:
            with raised(), leader().together():
                if not ended:  # else the others have all that they need of this region
                    state = _join_regions(run, state, restored, evaluator, console, quiet)
        except InterruptedBeforeError:
            return False
        display = display or open_display(console, job.steps, quiet)
        interrupt = held.enter_context(Interrupt())
        with contextlib.closing(display):
            given = state, restored, evaluator, checkpoints, display, console, interrupt
            try:
                return _loop(run, *given)
            except (Lost, Parted) as error:
                if not (getattr(error, "heals", True) and interrupt.requested):
                    raise
                say(console, f"{error}; it comes back with the next start")
                raise _LostAndSaved from error


def judged(workdir: Path) -> bool:
    """Whether the log of a run whose training has ended has its last evaluation, too."""
    file = workdir / METRICS
    return file.is_file() and any(record["kind"] == "end" for record in read_records(file))


@contextlib.contextmanager
def _closing(run: Run) -> Iterator[None]:
    """Close the run at the end; at once where the others have gone on without this region."""
    needed = True
    try:
        yield
    except Lost:
        needed = False
        raise
    finally:
        run.close(needed)


def _join_regions(run: Run, state, restored, evaluator: Evaluator, console: Console, quiet: bool):
    """Join the jobs of the other regions, if this is one of several; returns the state to train.

    Raises:
      RefusedError: the other jobs do not appear, or are of another run.
    """
    job, exchange = run.job, run.exchange
    if exchange is None:
        return state
    if job.by_rounds:
        # Learners wait for nobody: one that has compiled first would end a short run alone.
        apart = precompile(run.engine, run.engine.init(starting_params(run)))
        run.engine.warm(apart, _one_batch(run))
    if not quiet:
        console.print(f"region {exchange.region} waits for the others ...", highlight=False)
    try:
        _agree_on_names(job, exchange)
        done = rounds_landed(state) if job.by_rounds else state.counters.done_until
        exchange.join(job.config["wait_minutes"] * 60, done)
    except (ValueError, TimeoutError, StoreUnavailable) as error:
        raise RefusedError(lines_of(error), "cannot meet the other regions") from error
    if run.fault_hooks is not None:
        run.fault_hooks.began = origin.agreed(exchange, job.workdir)
    landings = None
    # Learners' landings stand in their metrics, and in the records; trainers' in their metrics.
    if not (job.by_rounds or job.method.adapts):
        loop = run.engine.sync_loop(state)
        landings = Landings(loop, job.workdir, exchange.region, exchange.epoch)
        if run.fault_hooks is not None:
            run.fault_hooks.not_finite = landings.not_finite
    if exchange.awaited:
        if landings is not None:
            landings.begin(state.counters.done_until)
        if restored is not None:
            run.engine.reconnect(state)
        return state
    if job.config["eval"]["every"]:
        evaluator.compile(state.whole())  # now, not while the others wait for this region
    example = functools.partial(draw, run) if job.method.adapts else _one_batch(run)

    def tell(line: str) -> None:
        if not quiet:
            console.print(line, highlight=False)

    state = rejoin.enter(run.engine, state, example, tell)
    step = int(state.counters.step)
    # After the last synchronisation: a replay must not take this region's payload in it away.
    if landings is not None and not run.engine.carrier.ended_before(state):
        landings.came(step, restored and restored.step)
    if not quiet:
        console.print(f"came into the run at step {step}", highlight=False)
    return state


def _agree_on_names(job: Job, exchange: RemoteExchange) -> None:
    """Refuse to join regions whose parameters have other names, since `auto` is by the device.

    Raises:
      ValueError: with the fix.
      StoreUnavailable: the store does not answer.
    """
    if "layer_loop" not in job.config["model"]:
        return  # a model of one's own, whose names follow from its settings
    own, wait_s = job.config["model"]["layer_loop"], 60 * job.config["wait_minutes"]
    first = exchange.agree("names", {"layer_loop": own}, wait_s)["layer_loop"]
    if first != own:
        raise ValueError(
            f"model.layer_loop: {first} in the region that came first -> {own} here, so that names "
            f"of parameters differ. The rendezvous keeps the first: for {own}, begin in another "
            f"rendezvous; else give all regions the same, --config.model.layer_loop={first}"
        )


def _one_batch(run: Run) -> Any:
    """A batch to compile with."""
    rows = run.engine.own_batch(run.job.batch)[1]
    return run.data.samples(0, run.job.batch, regions=run.job.here, rows=rows)


def _idle(job: Job) -> str:
    count, few = job.mesh.shape["stage"], job.microbatches
    return (
        f"{few} microbatches for {count} stages: each stage is idle {bubble(count, few):.0%} of "
        "the time; raise config.microbatches, or the batch"
    )


def _loop(
    run: Run,
    state,
    restored,
    evaluator: Evaluator,
    checkpoints: Checkpoints,
    display: Display,
    console: Console,
    interrupt: Interrupt,
) -> bool:
    """Open the log at the step of the state, and run the training loop; whether it is complete."""
    extra = restored and restored.extra
    step = restored.step if restored else -1
    late = run.exchange is not None and int(state.counters.step) > max(step, 0)
    if late:
        step = int(state.counters.step)
    with contextlib.closing(open_log(run.job, step)) as log:
        if restored is not None and leader().leads and (gap := missing(log.newest, restored.step)):
            say(console, f"{run.job.workdir / METRICS} {gap}")
        if late:
            newest = leader().broadcast_from_leader("newest record", lambda: log.newest)
            state, extra = continue_counts(state, newest, extra)
        judged = _eval_set(evaluator)
        if not log.begun:
            log.write([header(run, state), judged])
        if extra is not None:
            log.write([_resumes(run, restored, step)])
        if log.begun and judged != log.eval_set:
            log.write([judged])
        loop = TrainingLoop(run, state, evaluator, log, checkpoints, display, late)
        if extra is not None:
            loop.restore(extra, -1 if late else step)
        complete = loop.train(interrupt)
        if complete and loop.uncounted:
            raise NotCountedError(loop.step)
    if not (complete or loop.ended or run.exchange is None):
        run.exchange.pause()
    return complete


def missing(newest: Mapping[str, Any] | None, step: int) -> str | None:
    """A sentence on the steps that a metrics file lacks; None = it lacks none.

    Args:
      newest: the last step record in the file, or None.
      step: of the checkpoint, after which the run goes on.
    """
    last = 0 if newest is None else newest["step"]
    if last >= step:
        return None
    return (
        f"lacks steps {last + 1} to {step}, which the checkpoint has: curves and sums of this run "
        "leave them out"
    )


def _restore(run: Run, checkpoints: Checkpoints):
    """The newest usable checkpoint, or None; the samples to come must be those it was saved for."""
    try:
        restored = checkpoints.restore(
            run.engine, abstract_params(run.model), config=learnt(run.job.config)
        )
    except (ValueError, DamagedError) as error:
        raise RefusedError([str(error)], str(run.job.workdir)) from error
    if restored is not None and restored.extra["data_identity"] != run.data.identity:
        changed = differences(restored.extra["data"], text(run))
        what = "; ".join(changed) or "the shards of the regions"  # drawn by another library
        fix = f"Give it those, or {other_folder(run.job.workdir)}"
        raise RefusedError(
            [f"the samples are others than before (there -> here): {what}. {fix}"],
            str(run.job.workdir),
        )
    return restored


def _resumes(run: Run, restored: Restored | None, step: int) -> dict[str, Any]:
    """The record of a run that goes on."""
    changed = [] if restored is None else changes(restored.extra["place"], run)
    return {"kind": "resume", "step": step} | ({"changed": changed} if changed else {})


def _eval_set(evaluator) -> dict:
    return {
        "kind": "eval_set",
        "document": evaluator.document.tolist(),
        "count": evaluator.count.tolist(),
    }


def describe(run: Run, restored: Restored | None, console: Console) -> None:
    """Say in a few lines what is about to be trained."""
    job, summary = run.job, run.data.summary
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    if job.mesh.size > 1:
        devices += ", mesh " + ", ".join(f"{k} {v}" for k, v in job.mesh.shape.items())
    lines = [
        f"model    {param_count(run.whole):,} parameters, {run.tokenizer.name} tokens, "
        f"vocabulary {run.way.model.vocab_size or run.tokenizer.vocab_size}",
        f"corpus   {summary['corpus']}: {summary['documents']:,} documents, "
        f"{size(summary['bytes'])}, {summary['tokens']:,} tokens",
        f"method   {job.method.name}, {job.regions} regions, {job.batch} x {job.data.seq_len} "
        "tokens a region and step",
        f"trains   {trained_and_sent(run)}",
        f"devices  {devices}",
        *([f"computed {run.way.line}"] if run.way.line else []),
        f"run      {job.steps} steps, {job.steps * job.tokens_per_step:,} tokens, in {job.workdir}",
    ]
    held_out = summary["validation_documents"]
    if held_out < FEW_DOCUMENTS:
        lines.append(f"warning: {validation_documents(held_out)} only: raise data.val_fraction")
    if left_out := report.left_out(summary):
        lines.append(f"left out {left_out}")
    if isinstance(run.model, Pipeline):
        lines.append(
            "stages   {stages} of {blocks_per_stage} blocks, {microbatches} microbatches "
            "({schedule}): bubble {bubble:.1%}, padding {padding:.1%} of the parameters".format(
                **run.model.report()
            )
        )
    if restored is not None:
        lines.append(f"continues after step {restored.step}")
        lines += [f"changed  {line}" for line in changes(restored.extra["place"], run)]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
