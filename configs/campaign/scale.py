"""What papers claim of low-communication training, over a ladder of scales, by the same rules.

    python -m experiments campaign --plan        # what is left, in order, and its core-hours
    python -m experiments campaign --core_hours=8
    python -m experiments results                # table, figures and docs/evidence.md

Every method gets the same tokens: a batch of a size is shared by its regions. H = 30 for all. Inner
and outer learning rates are tuned for each method and size by successive halving over four points,
with equal budgets, on a seed that is never reported: all four for 8 rounds, the best two for 24, in
four regions, i.i.d. data. A method without an outer rate gets four inner ones. Momenta are those of
the papers. In a first grid (inner 3e-3, 9e-3; outer 0.4, 0.8) CoCoDC's best point was at both lower
edges, so the grid of all methods was moved. The runs of the first grid are among the records that
do not count.

Stages, each finished before the next:
- `1_first`: 0.18M and 0.7M parameters, 24 and 96 rounds, 2 and 4 regions, three seeds;
- `2_topics`: the same where every region has topics of its own;
- `3_seeds`: five seeds;
- `4_ladder`: up to 2.6M parameters, 384 rounds and 8 regions, and claims of more methods;
- `5_accelerator`: 10M to 150M parameters, for a GPU or a cluster.

The corpus is the running interpreter's standard library (as bytes), so that nothing is downloaded;
records of another corpus do not join. Another one: `--config.common.data.corpus=text:FOLDER`, or
`--config.common.data.tokenizer=bpe:1024`, with `--config.records=` a folder of its own.
"""

from ml_collections import ConfigDict

from experiments.campaign.config import arm, campaign, claim, size, stage, tuning

_INNER = "inner.learning_rate=2e-3,5e-3"
_INNER_ALONE = "inner.learning_rate=1e-3,2e-3,5e-3,1.2e-2"
_OUTER = "method.outer.learning_rate=0.2,0.5"
_OUTER_LATE = "method.outer.learning_rate=0.1,0.3"  # what comes a round late bears less
_FRAGMENTS = {"fragments": 3, "overlap": 5}


def get_config() -> ConfigDict:
    """Give the config."""
    return campaign(
        title="Claims of papers as a function of scale",
        records="records/scale",
        common={
            "data": {"corpus": "python", "tokenizer": "bytes", "seq_len": 64},
            "eval": {"sequences": 256, "batch": 32},
            "checkpoint": {"every": 0},
        },
        sizes=sizes(),
        arms=arms(),
        claims=claims(),
        stages={
            "1_first": stage(sizes=("180k", "700k"), rounds=(24, 96), regions=(2, 4)),
            "2_topics": stage(("180k", "700k"), (24, 96), (2, 4), splits=("topic",)),
            "3_seeds": stage(("180k", "700k"), (24, 96), (2, 4), seeds=(0, 1, 2, 3, 4)),
            "4_ladder": stage(("180k", "700k", "2600k"), (24, 96, 384), (2, 4, 8)),
            "5_accelerator": stage(("10m", "35m", "150m"), (96, 384), (2, 4, 8)),
        },
        tuning=tuning(rungs=((8, 4), (24, 2)), regions=4, seeds=(100,)),
    )


def sizes() -> dict:
    """Three layers of growing width, then presets."""

    def narrow(width: int) -> dict:
        heads = {"layers": 3, "heads": 4, "kv_heads": 4, "head_dim": width // 4}
        return {"model": {"width": width, "mlp_width": 3 * width, **heads}}

    def preset(name: str) -> dict:
        return {"model": {"preset": name, "compute_dtype": "bfloat16"}, "replicas": "vmap"}

    return {
        "180k": size(0.18e6, 8, **narrow(64)),
        "700k": size(0.68e6, 8, **narrow(128)),
        "2600k": size(2.6e6, 16, **narrow(256)),
        "10m": size(10.3e6, 32, **narrow(512)),
        "35m": size(35e6, 64, **preset("scaling_35m"), data={"seq_len": 512}),
        "150m": size(150e6, 128, **preset("diloco_150m"), data={"seq_len": 1024}),
    }


def arms() -> dict:
    """The methods, each with four points."""
    momentum = {"outer": {"momentum": 0.9}}
    return {
        "ddp": arm("ddp", (_INNER_ALONE,)),
        "averaging": arm("local_sgd", (_INNER_ALONE,)),
        "diloco": arm("diloco", (_INNER, _OUTER), method=momentum),
        "streaming": arm("streaming_diloco", (_INNER, _OUTER), method=_FRAGMENTS),
        "cocodc": arm("cocodc", (_INNER, _OUTER), method={**_FRAGMENTS, "codec": "e3m0"}),
        "eager": arm("eager_diloco", (_INNER, _OUTER_LATE)),
        "delayed": arm("delayed_diloco", (_INNER, _OUTER_LATE)),
        "muloco": arm("muloco", (_INNER, _OUTER)),
        "sparseloco": arm("sparseloco", (_INNER, "method.outer.learning_rate=0.5,1.0")),
        "noloco": arm("noloco", (_INNER_ALONE,), eval={"per_region": False}),
        "decoupled": arm("decoupled_momentum", (_INNER_ALONE,)),
    }


def claims() -> dict:
    """Each says that the final loss of `here` is at most (1 + margin) times that of `there`."""
    later = {key: None for key in ("1_first", "2_topics", "3_seeds", "5_accelerator")}
    return {
        "diloco_ddp": claim(
            "DiLoCo loses at most 1 % against data parallel training at equal tokens",
            "2311.08105; the gap shrinks with size: 2503.09799",
            "diloco",
            "ddp",
            0.01,
            "a gap under 1 % at more rounds or a larger model, or one that shrinks with size",
            published="equal perplexity at 500 times fewer bytes (H = 500)",
        ),
        "streaming_diloco": claim(
            "Streaming DiLoCo in 4 bits loses at most 1 % against DiLoCo",
            "2501.18512",
            "streaming",
            "diloco",
            0.01,
            "a gap over 1 % with an interval clear of it, at more rounds",
            published="equal loss at 400 times fewer bytes than data parallel",
        ),
        "cocodc_streaming": claim(
            "CoCoDC has a lower loss than Streaming DiLoCo at equal bytes and tokens",
            "2504.17672",
            "cocodc",
            "streaming",
            0.0,
            "a lower loss at a longer delay, or at more rounds",
            published="21.0 % fewer steps to a target perplexity, with twice the bytes",
        ),
        "eager_delayed": claim(
            "Eager updates have a lower loss than a naive delay of a round",
            "2502.12996",
            "eager",
            "delayed",
            0.0,
            "no difference at more rounds",
            published="eager 2.69 where DiLoCo has 2.68; naive far behind",
        ),
        "eager_diloco": claim(
            "Eager updates lose at most 1 % against DiLoCo",
            "2502.12996",
            "eager",
            "diloco",
            0.01,
            "a gap under 1 % at more rounds or with less outer momentum",
            published="2.69 against 2.68",
        ),
        "muloco_diloco": claim(
            "MuLoCo in 4 bits has a lower loss than DiLoCo",
            "2505.23725",
            "muloco",
            "diloco",
            0.0,
            "no difference at more rounds or a larger model",
            published="a lower loss at equal steps with 8 times fewer bytes",
        ),
        "nesterov_averaging": claim(
            "An outer Nesterov step has a lower loss than plain averaging",
            "2311.08105",
            "diloco",
            "averaging",
            0.0,
            "a lower loss at more rounds, or where regions have unlike data",
            published="Nesterov the best of the outer optimizers tried",
        ),
        "sparseloco_diloco": claim(
            "SparseLoCo at 1.6 % density has a lower loss than DiLoCo",
            "2508.15706",
            "sparseloco",
            "diloco",
            0.0,
            "a lower loss at more rounds",
            stages=later,
        ),
        "noloco_diloco": claim(
            "NoLoCo has a lower loss than DiLoCo at equal H",
            "2506.10911",
            "noloco",
            "diloco",
            0.0,
            "a lower loss in more regions",
            stages={**later, "4_ladder": {"regions": (4, 8)}},
        ),
        "decoupled_diloco": claim(
            "Decoupled momentum loses at most 1 % against DiLoCo",
            "2510.03371",
            "decoupled",
            "diloco",
            0.01,
            "a gap under 1 % at more rounds",
            published="up to 16 times fewer bytes",
            stages=later,
        ),
    }
