"""Every setting of a training run, with its default and what it is: a table.

A file in configs/ starts from `base(method, ...)` and changes what it needs; the command line
overrides any field: `--config.data.seq_len=256 --config.method.period=50`. `None` switches an
optional field off. `train --help` prints the table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import ml_collections
from ml_collections import ConfigDict

from experiments.cli import Field, defaults, plain_type
from experiments.train.methods import section
from lowcomm_jax.adloco.setup import AdaptiveSetup
from lowcomm_jax.data import DataConfig
from lowcomm_jax.models import TransformerConfig
from lowcomm_jax.optimizers import InnerConfig
from lowcomm_jax.settings import config_fields, settings_of

# By dotted names. Fields of `method` are the keywords of its factory. Those that a record
# describes, as most of `model` and the settings of an engine, follow from it (`_fields_of`).
_RUN = {
    "seed": (0, "seeds the initial weights, the regions' shards and the order of samples"),
    "steps": (600, "inner steps of the run; 0 = as many as `tokens` asks for"),
    "tokens": (
        int,
        "Tokens of all regions together; the run makes as many steps (give steps=0).",
    ),
    "regions": (4, "number of regions, R"),
    "batch": (4, "sequences a region trains on per step"),
    "microbatches": (
        0,
        "Microbatches of a region's batch in the pipeline; 0 = microbatches of one sequence on "
        "every device of a stage. Read with mesh.stage above 1.",
    ),
    "pipeline_schedule": (
        "gpipe",
        "Order of a pipeline's microbatches: gpipe, or 1f1b (less memory; each stage computes its "
        "forward pass twice).",
    ),
    "random_routing": (
        False,
        "Whether every microbatch takes a random path through the stages of all regions (NoLoCo).",
    ),
    "weights": ("equal", 'weight of each region in a mean: equal, tokens, or "0.5,0.2,0.3"'),
    "participation": (1.0, "seeded chance that a region takes part in an exchange, in (0, 1]"),
    "faults": (
        str,
        "File with a script of faults (experiments/faults/fault.py), or with the record of what "
        "happened to separate jobs (happened.py).",
    ),
    "network": (
        str,
        "Preset or file of the links between the regions. A virtual clock books the time that the "
        "run would take there; methods may read their T_c and T_s from it.",
    ),
    # How payloads travel, and the settings of a job that is one region of several.
    "exchange": (
        "mesh",
        "How payloads travel. mesh: all regions are in this program. One job per region: store "
        "(through the rendezvous folder), peers (from job to job), or module:Class, a transport of "
        "your own (lowcomm_jax.exchange.Transport).",
    ),
    "region": (int, "which region this job is, from 0"),
    "rendezvous": (
        str,
        "Url of the folder that all jobs of the run share: file:///..., gs:// or s3://.",
    ),
    "secret": (str, "key that all jobs share: file:PATH or env:NAME"),
    "address": (
        str,
        "HOST:PORT at which the other jobs reach this one; port 0 = a free one. Default of "
        "exchange=peers: 127.0.0.1:0, for jobs of one machine.",
    ),
    "listen": (
        str,
        "HOST:PORT of this machine to listen on, where the others reach it by another address "
        "(NAT, a map of ports); default: the address.",
    ),
    "certificates": (
        str,
        "Folder with ca.crt, tls.crt and tls.key of this job; default: the job makes them at its "
        "start.",
    ),
    "wait_minutes": (10.0, "longest wait for the other jobs at the start"),
    "processes": (
        int,
        "Number of processes of this job, which share its mesh (jax.distributed); each has devices "
        "of its own. With exchange=mesh the job is the whole run, else this region. 0 = as the "
        "launcher says (Slurm, Kubernetes, Open MPI, MPICH, TPU, JAX_PROCESS_ID). Default: 0 with "
        "exchange=mesh, else 1.",
    ),
    "process": (int, "number of this process, from 0; process 0 leads"),
    "coordinator": (str, "HOST:PORT where process 0 listens"),
    "deadline_s": (
        float,
        "Seconds that the others wait for a region that is alive but late; default: learnt from "
        "the delays observed so far.",
    ),
    "heal": (
        "stop",
        "What to do where anchors differ that must be equal: stop, or take that of the majority or "
        "of the lowest region.",
    ),
}
_DEVICES = {
    "frozen": ((), "regular expressions of parameter names that are not trained"),
    "mesh.region": (0, "slots of regions on the mesh; 0 = as many as fit"),
    "mesh.stage": (1, "pipeline stages inside a region"),
    "mesh.fsdp": (0, "devices of a region that share parameters and batch; 0 = the rest"),
    "mesh.tensor": (1, "devices of a region that share each matrix (tensor parallelism)"),
}
_MODEL = {
    "model.name": (
        str,
        "module:factory of a model of your own (lowcomm_jax.models.Trainable); its settings then "
        "take the place of all fields below. None = the built-in decoder.",
    ),
    "model.preset": ("nano", "a name of `lowcomm_jax.models.PRESETS`"),
    "model.init_from": (
        str,
        "Starting weights: a folder with a LLaMA-shaped safetensors checkpoint, which replaces the "
        "preset, or the workdir of another run of the same model; None = random ones.",
    ),
}
_UPKEEP = {
    "eval.every": (100, "inner steps between evaluations; 0 = only at the start and the end"),
    "eval.sequences": (
        128,
        "Validation sequences of an evaluation, spread over all documents and the same every time.",
    ),
    "eval.batch": (16, "sequences evaluated in one call"),
    "eval.per_region": (False, "whether to evaluate every region's own weights, too"),
    "log.every": (20, "inner steps between two lines of progress"),
    "log.tensorboard": (False, "also write event files to WORKDIR/tensorboard"),
    "log.wandb": (str, "also log to this Weights & Biases project"),
    "log.prometheus": (
        int,
        "Also serve the newest numbers to Prometheus on this port; with a job per region on port + "
        "region.",
    ),
    "checkpoint.every": (
        200,
        "Inner steps between checkpoints; 0 = only when interrupted and at the end.",
    ),
    "checkpoint.keep_last": (2, "newest checkpoints that are kept"),
    "checkpoint.keep_best": (
        True,
        "whether the one of lowest evaluation loss is kept, too",
    ),
}


def _fields_of(
    record: type, fields: Mapping[str, str], unset: str = ""
) -> dict[str, tuple[Any, str]]:
    """The rows of what a record describes (`lowcomm_jax.settings`).

    Args:
      fields: name -> dotted name in a config, of those that a config has.
      unset: a sentence on what an unset field takes, with which all of them are unset; "" = they
        have the record's defaults.
    """
    described, rows = settings_of(record), {}
    for name, dotted in fields.items():
        default, about = described[name].default, described[name].about
        if unset or default is None:
            default = plain_type(described[name].kind)
        rows[dotted] = default, f"{about} {unset}".rstrip()
    return rows


def _section(name: str, record: type, without: Collection[str] = ()) -> dict[str, str]:
    """Field of a record -> its dotted name in the section that has all of them, but for some."""
    return {x: f"{name}.{x}" for x in settings_of(record) if x not in without}


_ROWS = {
    **_RUN,
    **_fields_of(AdaptiveSetup, config_fields(AdaptiveSetup)),
    **_DEVICES,
    **_fields_of(InnerConfig, _section("inner", InnerConfig)),
    **_MODEL,
    **_fields_of(TransformerConfig, {"vocab_size": "model.vocab_size"}, "Unset = the tokenizer's."),
    **_fields_of(
        TransformerConfig,
        _section("model", TransformerConfig, ("vocab_size",)),
        "Unset = the preset's.",
    ),
    # The run gives the others.
    **_fields_of(DataConfig, _section("data", DataConfig, ("seed", "regions", "trainers"))),
    **_UPKEEP,
}
FIELDS = {name: Field(*row) for name, row in _ROWS.items()}
"""By dotted names, all but those of methods and of models of one's own."""


def get_config() -> ConfigDict:
    """DiLoCo on the laptop model: the defaults of everything."""
    return base("diloco", period=30, outer={"name": "nesterov"})


def base(method: str, **knobs: Any) -> ConfigDict:
    """The default config around one method.

    Args:
      method: a name of `lowcomm_jax.methods.NAMES`, or `module:function` of your own.
      knobs: keywords of the method's factory, and parts of a method (`experiments.train.parts`).
    """
    config = defaults(FIELDS)
    config.method = section(method, knobs)  # the keywords of the method's factory
    # A small model on a laptop learns fastest at this peak; published runs of 150M use 4e-4.
    config.inner.learning_rate, config.inner.warmup_steps = 2e-3, 50
    return config.lock()


def published(
    config: ConfigDict, *, model: str, regions: int, batch: int, steps: int
) -> ConfigDict:
    """Set what most papers share: C4, sequences of 1024, AdamW 4e-4, 1000 steps of warm-up.

    Args:
      model: a name of `lowcomm_jax.models.PRESETS`; its computations then run in bfloat16.
      regions, batch, steps: as in `base`.

    Returns:
      The same config, changed in place.
    """
    config.model.preset = model
    config.model.compute_dtype = "bfloat16"
    config.regions, config.batch, config.steps = regions, batch, steps
    config.data.corpus, config.data.tokenizer = "hf:allenai/c4:en", "bpe:32000"
    config.data.limit = 10_000_000
    config.data.seq_len = 1024
    config.inner.learning_rate, config.inner.warmup_steps = 4e-4, 1000
    config.eval.every, config.eval.sequences = 1000, 1024
    config.log.every = 100
    config.checkpoint.every = 2000
    return config


def plain(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The config as nested plain dicts, tuples as lists: what is stored and compared."""

    def convert(value: Any) -> Any:
        if isinstance(value, ConfigDict | dict):
            return {key: convert(entry) for key, entry in value.items()}
        return [convert(v) for v in value] if isinstance(value, tuple | list) else value

    return convert(config)
