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


def get_config() -> ConfigDict:
    """DiLoCo on the laptop model: the defaults of everything."""
    return base("diloco", period=30, outer={"name": "nesterov"})


def base(method: str, **knobs: Any) -> ConfigDict:
    """The default config around one method; `knobs` are the keywords of the method's factory."""
    config = ConfigDict()
    config.seed = 0  # of the initial weights, the regions' shards, the order of samples
    config.steps = 600  # inner steps of the run; 0 = as many as `tokens` asks for
    config.tokens = config_dict.placeholder(int)  # tokens of all regions together (with steps = 0)
    config.regions = 4  # R
    config.batch = 4  # sequences a region trains on per step
    config.accumulate = 1  # parts of a region's batch whose gradients are added up
    # Microbatches that go through pipeline stages; 0 = of one sequence on every device of a stage.
    config.microbatches = 0
    config.pipeline_schedule = "gpipe"  # or 1f1b: less memory, every stage goes forward twice
    # Let every microbatch take a random path through the stages of all regions (NoLoCo).
    config.random_routing = False
    config.weights = "equal"  # of regions in a mean: equal, tokens, or R numbers "0.5,0.2,0.3"
    config.participation = 1.0  # chance of a region to take part in an exchange (seeded)
    # Script of faults, or what happened to jobs (experiments/faults/fault.py, happened.py).
    config.faults = config_dict.placeholder(str)
    # Preset or file of the links between the regions: what the run would take there is booked on a
    # virtual clock, and a method may draw T_c and T_s from it.
    config.network = config_dict.placeholder(str)
    _add_jobs(config)
    config.replicas = "map"  # regions that share a device: map = one after another, vmap = batched
    config.block = 16  # inner steps handed to the device at once
    config.offload = False  # anchor, outer state, residuals and snapshots in pinned host memory
    config.codec_error = False  # measure what compression loses; it takes another decoding
    # Exchange payloads while inner steps run; None = with a method with a delay, on GPUs and TPUs.
    config.concurrent_exchange = config_dict.placeholder(bool)
    config.frozen = ()  # regexes of parameter names that are not trained

    config.mesh = ConfigDict()  # devices; 0 = as many as there are and divide
    config.mesh.region = 0
    config.mesh.stage = 1  # pipeline stages inside a region
    config.mesh.fsdp = 0
    config.mesh.tensor = 1

    config.method = section(method, knobs)  # the keywords of the method's factory
    config.inner = _inner_section()
    config.model = _model_section()
    config.data = _data_section()

    config.adaptive = _adaptive_section()
    config.guards = ConfigDict()
    config.guards.outlier_factor = config_dict.placeholder(float)  # times the median norm
    config.guards.max_update_norm = config_dict.placeholder(float)  # clip of the outer update

    _add_upkeep(config)
    return config.lock()


def published(
    config: ConfigDict, *, model: str, regions: int, batch: int, steps: int
) -> ConfigDict:
    """The setting the papers share: C4, sequences of 1024, AdamW 4e-4, 1000 steps of warm-up."""
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
    """How payloads travel, and what a job that is one region of several must know."""
    # mesh: all regions in this program; one job per region: store (through the rendezvous) or peers
    # (from job to job).
    config.exchange = "mesh"
    config.region = config_dict.placeholder(int)  # which region this job is, from 0
    # Folder of all jobs: file:///..., gs:// or s3://
    config.rendezvous = config_dict.placeholder(str)
    config.secret = config_dict.placeholder(str)  # of the jobs: file:PATH or env:NAME
    config.address = "127.0.0.1:0"  # of this job, as the other peers reach it; port 0 = a free one
    # Of payloads between peers. flight: Arrow Flight with mutual TLS (the extra `flight`). jax:
    # plain text, and whoever can connect can end the job; loopback only, unless trusted_network.
    config.transport = "flight"
    config.trusted_network = False  # with transport=jax: nobody else can connect to `address`
    # Folder with ca.crt, tls.crt and tls.key of this job; default: made when it starts.
    config.certificates = config_dict.placeholder(str)
    config.wait_minutes = 10.0  # for the other jobs to appear
    # Processes of this job, each with devices of its own, which share its mesh (jax.distributed):
    # with exchange=mesh of the whole run, else of this region. 0 = as the launcher says (Slurm,
    # Kubernetes, Open MPI, MPICH, TPU, JAX_PROCESS_ID). Default: 0 with exchange=mesh, else 1.
    config.processes = config_dict.placeholder(int)
    config.process = config_dict.placeholder(int)  # which of them this is; process 0 leads
    config.coordinator = config_dict.placeholder(str)  # HOST:PORT of process 0
    # How late a living region may be before the others go on without it; default: as was observed.
    config.deadline_s = config_dict.placeholder(float)
    # Where anchors differ that must not: stop, or take that of the majority or the lowest region.
    config.heal = "stop"


def _add_upkeep(config: ConfigDict) -> None:
    """When to evaluate, report and save."""
    config.eval = ConfigDict()
    config.eval.every = 100  # inner steps between evaluations; 0 = only at the start and the end
    config.eval.sequences = 128  # spread over all validation documents, the same every time
    config.eval.batch = 16  # sequences evaluated at once
    config.eval.per_region = False  # also every region's own weights

    config.log = ConfigDict()
    config.log.every = 20  # inner steps between two lines of progress
    config.log.tensorboard = False  # also event files in WORKDIR/tensorboard
    config.log.wandb = config_dict.placeholder(str)  # also a run in this Weights & Biases project
    # Also the newest numbers for Prometheus, on this port; with a job per region, port + region.
    config.log.prometheus = config_dict.placeholder(int)

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 200  # inner steps; 0 = only when interrupted and at the end
    config.checkpoint.keep_last = 2
    config.checkpoint.keep_best = True  # also the one of lowest evaluation loss


def _adaptive_section() -> ConfigDict:
    """For methods whose batches grow; `batch` is then the nominal one."""
    fields = ConfigDict()
    fields.scaling = "none"  # of the learning rate with batch / nominal: none, sqrt, linear
    fields.largest_microbatch = config_dict.placeholder(int)  # samples in memory at once
    fields.memory_gb = config_dict.placeholder(float)  # of a device, to find it from
    fields.stack_trainers = True  # steps of all of them in one program, not one call each
    return fields


def _inner_section() -> ConfigDict:
    """The fields of `lowcomm_jax.optimizers.InnerConfig`."""
    # A small model on a laptop learns fastest at this peak; published runs of 150M use 4e-4.
    return ConfigDict(dataclasses.asdict(InnerConfig(learning_rate=2e-3, warmup_steps=50)))


def _model_section() -> ConfigDict:
    """A preset, starting weights, and any field of `TransformerConfig` to set differently."""
    fields = ConfigDict()
    fields.preset = "nano"  # a name of `lowcomm_jax.models.PRESETS`
    # Folder of a LLaMA-shaped safetensors checkpoint, which then replaces the preset, or the
    # workdir of another run, whose anchor fits the preset.
    fields.init_from = config_dict.placeholder(str)
    types = typing.get_type_hints(TransformerConfig)
    for field in dataclasses.fields(TransformerConfig):
        kind = types[field.name]
        fields[field.name] = config_dict.placeholder(kind if kind in (int, float, bool) else str)
    return fields


def _data_section() -> ConfigDict:
    """The fields of `lowcomm_jax.data.DataConfig` that are not settled elsewhere."""
    fields = ConfigDict()
    fields.corpus = "python"  # or text:PATH, hf:NAME, parquet:GLOB, arrayrecord:GLOB
    fields.tokenizer = "bytes"  # or bpe:VOCAB, file:PATH
    fields.seq_len = 128
    fields.sharding = "iid"  # topic, dirichlet
    fields.alpha = 0.5  # of dirichlet
    fields.packing = "stream"  # document
    fields.val_fraction = 0.05  # of the documents
    fields.split_seed = 0
    fields.limit = config_dict.placeholder(int)  # documents read
    fields.cache_dir = config_dict.placeholder(str)  # default: the user's cache folder
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
