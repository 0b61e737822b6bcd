"""Every setting of a training run, with its default.

A file in configs/ starts from `base(method, ...)` and changes what it needs; the command line
overrides any field: `--config.data.seq_len=256 --config.method.period=50`. `None` switches an
optional field off.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import ml_collections
from ml_collections import ConfigDict, config_dict

from experiments.train.methods import section
from lowcomm_jax.models import TransformerConfig
from lowcomm_jax.optimizers import InnerConfig
from lowcomm_jax.setup import SETTINGS


def get_config() -> ConfigDict:
    """DiLoCo on the laptop model: the defaults of everything."""
    return base("diloco", period=30, outer={"name": "nesterov"})


def base(method: str, **knobs: Any) -> ConfigDict:
    """The default config around one method.

    Args:
      method: a name of `experiments.train.methods.METHODS`, or `module:function` of your own.
      knobs: keywords of the method's factory, and parts of a method (`experiments.train.parts`).
    """
    config = ConfigDict()
    config.seed = 0  # seeds the initial weights, the regions' shards and the order of samples
    config.steps = 600  # inner steps of the run; 0 = as many as `tokens` asks for
    # Tokens of all regions together; the run makes as many steps (give steps=0).
    config.tokens = config_dict.placeholder(int)
    config.regions = 4  # number of regions, R
    config.batch = 4  # sequences a region trains on per step
    # Microbatches of a region's batch in the pipeline; 0 = microbatches of one sequence on every
    # device of a stage. Read with mesh.stage above 1.
    config.microbatches = 0
    # Order of a pipeline's microbatches: gpipe, or 1f1b (less memory; each stage computes its
    # forward pass twice).
    config.pipeline_schedule = "gpipe"
    # Whether every microbatch takes a random path through the stages of all regions (NoLoCo).
    config.random_routing = False
    config.weights = "equal"  # weight of each region in a mean: equal, tokens, or "0.5,0.2,0.3"
    config.participation = 1.0  # seeded chance that a region takes part in an exchange, in (0, 1]
    # File with a script of faults (experiments/faults/fault.py), or with the record of what
    # happened to separate jobs (happened.py).
    config.faults = config_dict.placeholder(str)
    # Preset or file of the links between the regions. A virtual clock books the time that the run
    # would take there; methods may read their T_c and T_s from it.
    config.network = config_dict.placeholder(str)
    _add_jobs(config)
    for name, setting in SETTINGS.items():  # each describes itself in `lowcomm_jax.setup`
        if setting.in_config:
            missing = setting.default is None
            config[name] = config_dict.placeholder(setting.kinds[0]) if missing else setting.default
    config.frozen = ()  # regular expressions of parameter names that are not trained

    config.mesh = ConfigDict()  # devices; 0 = as many as there are and divide
    config.mesh.region = 0  # slots of regions on the mesh; 0 = as many as fit
    config.mesh.stage = 1  # pipeline stages inside a region
    config.mesh.fsdp = 0  # devices of a region that share parameters and batch; 0 = the rest
    config.mesh.tensor = 1  # devices of a region that share each matrix (tensor parallelism)

    config.method = section(method, knobs)  # the keywords of the method's factory
    config.inner = _inner_section()
    config.model = _model_section()
    config.data = _data_section()

    config.adaptive = _adaptive_section()
    config.guards = ConfigDict()
    # Leave out a region whose pseudo-gradient is longer than this times the median; None = off.
    config.guards.outlier_factor = config_dict.placeholder(float)
    # Clip the outer update of a fragment to this L2 norm; None = off.
    config.guards.max_update_norm = config_dict.placeholder(float)

    _add_upkeep(config)
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


def _add_jobs(config: ConfigDict) -> None:
    """How payloads travel, and the settings of a job that is one region of several."""
    # How payloads travel. mesh: all regions are in this program. One job per region: store (through
    # the rendezvous folder) or peers (from job to job).
    config.exchange = "mesh"
    config.region = config_dict.placeholder(int)  # which region this job is, from 0
    # Url of the folder that all jobs of the run share: file:///..., gs:// or s3://.
    config.rendezvous = config_dict.placeholder(str)
    config.secret = config_dict.placeholder(str)  # key that all jobs share: file:PATH or env:NAME
    # HOST:PORT at which the other jobs reach this one (exchange=peers); port 0 = a free one.
    config.address = "127.0.0.1:0"
    # HOST:PORT of this machine to listen on, where the others reach it by another address (NAT, a
    # map of ports); default: the address.
    config.listen = config_dict.placeholder(str)
    # Folder with ca.crt, tls.crt and tls.key of this job; default: the job makes them at its start.
    config.certificates = config_dict.placeholder(str)
    config.wait_minutes = 10.0  # longest wait for the other jobs at the start
    # Number of processes of this job, which share its mesh (jax.distributed); each has devices of
    # its own. With exchange=mesh the job is the whole run, else this region. 0 = as the launcher
    # says (Slurm, Kubernetes, Open MPI, MPICH, TPU, JAX_PROCESS_ID). Default: 0 with exchange=mesh,
    # else 1.
    config.processes = config_dict.placeholder(int)
    config.process = config_dict.placeholder(int)  # number of this process, from 0; process 0 leads
    config.coordinator = config_dict.placeholder(str)  # HOST:PORT where process 0 listens
    # Seconds that the others wait for a region that is alive but late; default: learnt from the
    # delays observed so far.
    config.deadline_s = config_dict.placeholder(float)
    # What to do where anchors differ that must be equal: stop, or take that of the majority or of
    # the lowest region.
    config.heal = "stop"


def _add_upkeep(config: ConfigDict) -> None:
    """When to evaluate, report and save."""
    config.eval = ConfigDict()
    config.eval.every = 100  # inner steps between evaluations; 0 = only at the start and the end
    # Validation sequences of an evaluation, spread over all documents and the same every time.
    config.eval.sequences = 128
    config.eval.batch = 16  # sequences evaluated in one call
    config.eval.per_region = False  # whether to evaluate every region's own weights, too

    config.log = ConfigDict()
    config.log.every = 20  # inner steps between two lines of progress
    config.log.tensorboard = False  # also write event files to WORKDIR/tensorboard
    config.log.wandb = config_dict.placeholder(str)  # also log to this Weights & Biases project
    # Also serve the newest numbers to Prometheus on this port; with a job per region on port +
    # region.
    config.log.prometheus = config_dict.placeholder(int)

    config.checkpoint = ConfigDict()
    # Inner steps between checkpoints; 0 = only when interrupted and at the end.
    config.checkpoint.every = 200
    config.checkpoint.keep_last = 2  # newest checkpoints that are kept
    config.checkpoint.keep_best = True  # whether the one of lowest evaluation loss is kept, too


def _adaptive_section() -> ConfigDict:
    """For methods whose batches grow; `batch` is then the nominal one."""
    fields = ConfigDict()
    # How the learning rate grows with the batch over the nominal one: none, sqrt or linear.
    fields.scaling = "none"
    fields.largest_microbatch = config_dict.placeholder(int)  # most samples in memory at once
    return fields


def _inner_section() -> ConfigDict:
    """The fields of `lowcomm_jax.optimizers.InnerConfig`."""
    # A small model on a laptop learns fastest at this peak; published runs of 150M use 4e-4.
    return ConfigDict(dataclasses.asdict(InnerConfig(learning_rate=2e-3, warmup_steps=50)))


def _model_section() -> ConfigDict:
    """The built-in decoder: a preset, weights, and any field of `TransformerConfig`."""
    fields = ConfigDict()
    # module:factory of a model of your own (lowcomm_jax.models.Trainable); its settings then take
    # the place of all fields below. None = the built-in decoder.
    fields.name = config_dict.placeholder(str)
    fields.preset = "nano"  # a name of `lowcomm_jax.models.PRESETS`
    # Starting weights: a folder with a LLaMA-shaped safetensors checkpoint, which replaces the
    # preset, or the workdir of another run of the same model; None = random ones.
    fields.init_from = config_dict.placeholder(str)
    types = typing.get_type_hints(TransformerConfig)
    for field in dataclasses.fields(TransformerConfig):
        kind = types[field.name]
        fields[field.name] = config_dict.placeholder(kind if kind in (int, float, bool) else str)
    return fields


def _data_section() -> ConfigDict:
    """The fields of `lowcomm_jax.data.DataConfig` that no other section gives; described there."""
    fields = ConfigDict()
    # python (the interpreter's standard library), text:PATH, hf:NAME, parquet:GLOB or
    # arrayrecord:GLOB.
    fields.corpus = "python"
    fields.tokenizer = "bytes"
    fields.seq_len = 128
    fields.sharding = "iid"
    fields.alpha = 0.5
    fields.packing = "stream"
    fields.val_fraction = 0.05
    fields.split_seed = 0
    fields.limit = config_dict.placeholder(int)
    fields.cache_dir = config_dict.placeholder(str)
    fields.text_column = "text"
    fields.topic_column = config_dict.placeholder(str)
    fields.split = "train"
    fields.eos_token = config_dict.placeholder(str)
    return fields


def plain(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The config as nested plain dicts, tuples as lists: what is stored and compared."""

    def convert(value: Any) -> Any:
        if isinstance(value, ConfigDict | dict):
            return {key: convert(entry) for key, entry in value.items()}
        return [convert(v) for v in value] if isinstance(value, tuple | list) else value

    return convert(config)
