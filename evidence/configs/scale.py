"""What papers claim of low-communication training, over a ladder of scales, by the same rules.

    python -m evidence campaign --plan        # what is left, in order, and its core-hours
    python -m evidence campaign --core_hours=8
    python -m evidence                           # the pages and their pictures

Every method gets the same tokens: a batch of a size is shared by its regions. H = 30 for all. Inner
and outer learning rates are tuned for each method and size by successive halving over four points,
on a seed that is never reported: all four for 8 rounds, the best two for 24, in four regions,
i.i.d. data. A method without an outer rate gets four inner ones. Other settings, such as momenta,
are those of the methods' configs or of `arms`. In a first grid (inner 3e-3, 9e-3; outer 0.4, 0.8)
CoCoDC's best point was at both lower edges, so the grid of all methods was moved. The runs of the
first grid are among the records that do not count. Points next to the best that the grid lacks
train for 24 rounds, too, up to five times, so that budgets are equal on the grid alone: the lowest
inner rate of the grid was too high for the larger models.

Stages, each finished before the next:
- `1_first`: 0.18M and 0.7M parameters, 24 and 96 rounds, 2 and 4 regions, three seeds;
- `1_large` and `1_long`: 2.6M for 24 rounds, and 384 rounds of 0.18M, of the methods whose loss is
  fitted against size and tokens;
- `2_bytes`: as few bytes as in the papers: DiLoCo at H = 480, Streaming DiLoCo at H = 60;
- `2_regions`: 0.39M, whose batch 16 regions can share, of DiLoCo and NoLoCo;
- `2_topics`: the same where every region has topics of its own;
- `2_variants`: more methods, and what a method's settings change, each against the other setting at
  the same learning rates. These are payloads in 4 and 2 bits, density of SparseLoCo, groups and
  pull of NoLoCo, and parts of AdLoCo. Further delay, sends and compensation of CoCoDC, rank, H and
  delay of DiLoCoX, and whom Decoupled DiLoCo waits for;
- `3_long`, `3_regions`, `3_seeds`, `3_topics`, `3_variants`: five seeds of `1_long`, of NoLoCo at
  0.39M, of `1_first` and the settings of `2_variants` at 0.18M, of `2_topics`, and of
  `2_variants` at 0.68M;
- `4_ladder`: up to 2.6M parameters, 384 rounds and 8 regions, and all claims between methods;
- `5_accelerator`: 10M to 150M parameters, 24 and 96 rounds of the fitted methods, on a GPU;
- `6_accelerator`: 10M to 150M parameters, all claims between methods, for a GPU or a cluster;
- `7_accelerator`: five seeds of `5_accelerator`.

The corpus is the running interpreter's standard library (as bytes), so that nothing is downloaded.
Records of another corpus do not join: to continue these, run Python 3.11.7. Another corpus:
`--config.common.data.corpus=text:FOLDER`, or `--config.common.data.tokenizer=bpe:1024`, with
`--config.records=` a folder of its own.
"""

from ml_collections import ConfigDict

from evidence.campaign.config import arm, campaign, claim, size, stage, tuning, variant

_INNER = "inner.learning_rate=2e-3,5e-3"
_INNER_ALONE = "inner.learning_rate=1e-3,2e-3,5e-3,1.2e-2"
_OUTER = "method.outer.learning_rate=0.2,0.5"
_OUTER_LATE = "method.outer.learning_rate=0.1,0.3"  # what comes a round late bears less
_OUTER_PLAIN = "method.outer.learning_rate=0.5,1.0"  # with little momentum, or none
_OUTER_BETA = "method.beta=0.2,0.5"  # NoLoCo's name for it
_FRAGMENTS = {"fragments": 3, "overlap": 5}
TUNING = tuning(rungs=((8, 4), (24, 2)), regions=4, seeds=(100,), widen=5)
_FITTED = ("1_large", "1_long", "3_long", "5_accelerator", "7_accelerator")
_FIRST = ("1_first", "2_topics", "3_seeds", "3_topics", "4_ladder", "6_accelerator")
FIVE = (0, 1, 2, 3, 4)
EARLIER = (
    "Records at rates that the campaign does not try are of earlier grids. For AdLoCo, decoupled "
    "momentum and NoLoCo these had one outer rate each; with tuned ones all rungs ran again"
)
_SMALL = {"sizes": ("180k",), "regions": (4,)}


def get_config() -> ConfigDict:
    """Give the config."""
    return campaign(
        title="Evidence: what papers claim, as a function of scale",
        records="evidence/records/scale",
        page="scale",
        text="Python sources",
        origin=(
            "The standard library of Python 3.11.7 without its tests, "
            "`--config.common.data.corpus=python`: 12.1M tokens, of which 0.7M are held out. A run "
            f"on more than the rest sees some of them again. {EARLIER}"
        ),
        see=(
            "Of these scales 0.18M after 384 rounds alone has as many as 20 tokens a parameter. "
            "On another corpus, in larger tokens, and where both agree or differ: "
            "[WikiText-2](wikitext.md#on-both-corpora)."
        ),
        common=common(corpus="python", tokenizer="bytes"),
        sizes=sizes(),
        arms=arms(),
        claims=claims() | settings(),
        stages={
            "1_first": stage(sizes=("180k", "700k"), rounds=(24, 96), regions=(2, 4)),
            "1_large": stage(("2600k",), (24,), (2, 4)),
            "1_long": stage(("180k",), (384,), (2, 4)),
            "2_bytes": stage(("180k",), (96, 384), (4,), seeds=FIVE),
            "2_regions": stage(("390k",), (24,), (4, 8, 16)),
            "2_topics": stage(("180k", "700k"), (24, 96), (2, 4), splits=("topic",)),
            "2_variants": stage(("180k", "700k"), (24, 96), (4,)),
            "3_long": stage(("180k",), (384,), (2, 4), seeds=FIVE),
            "3_regions": stage(("390k",), (24,), (4, 8, 16), seeds=FIVE),
            "3_seeds": stage(("180k", "700k"), (24, 96), (2, 4), seeds=FIVE),
            "3_topics": stage(("180k", "700k"), (24, 96), (2, 4), ("topic",), FIVE),
            "3_variants": stage(("700k",), (24, 96), (4,), seeds=FIVE),
            "4_ladder": stage(("180k", "700k", "2600k"), (24, 96, 384), (2, 4, 8)),
            "5_accelerator": stage(("10m", "35m", "150m"), (24, 96), (4,)),
            "6_accelerator": stage(("10m", "35m", "150m"), (96, 384), (2, 4, 8)),
            "7_accelerator": stage(("10m", "35m", "150m"), (24, 96), (4,), seeds=FIVE),
        },
        tuning=TUNING,
    )


def common(**data: str) -> dict:
    """Fields of all runs, on these data."""
    return {
        "data": {**data, "seq_len": 64},
        "eval": {"sequences": 256, "batch": 32},
        "checkpoint": {"every": 0},
    }


def sizes() -> dict:
    """Three layers of growing width, then presets, which have 19M and 121M parameters with bytes.

    All see the same context: losses with a longer one would not be on the same curve.
    """

    def preset(name: str) -> dict:
        return {"model": {"preset": name, "compute_dtype": "bfloat16"}, "replicas": "vmap"}

    return {
        "180k": size(0.18e6, 8, **narrow(64)),
        "390k": size(0.39e6, 16, **narrow(96)),
        "700k": size(0.68e6, 8, **narrow(128)),
        "2600k": size(2.6e6, 16, **narrow(256)),
        "10m": size(10.3e6, 32, **narrow(512), replicas="vmap"),
        "35m": size(19e6, 64, **preset("scaling_35m")),
        "150m": size(121e6, 128, **preset("diloco_150m")),
    }


def narrow(width: int) -> dict:
    """Three layers with four heads."""
    heads = {"layers": 3, "heads": 4, "kv_heads": 4, "head_dim": width // 4}
    return {"model": {"width": width, "mlp_width": 3 * width, **heads}}


def arms() -> dict:
    """The methods, each with four points, and variants of them."""
    heavy = {"momentum": 0.9}
    momentum, light = {"outer": heavy}, {"outer": {"momentum": 0.5}}
    coded = {**_FRAGMENTS, "codec": "e3m0"}
    unequal = {"speeds": (1.0, 0.9, 0.75, 0.6), "outages": (), "period": 12}
    tuned = {
        "ddp": arm("ddp", (_INNER_ALONE,)),
        "averaging": arm("local_sgd", (_INNER_ALONE,)),
        "diloco": arm("diloco", (_INNER, _OUTER), method=momentum),
        "streaming": arm("streaming_diloco", (_INNER, _OUTER), method=_FRAGMENTS),
        "cocodc": arm("cocodc", (_INNER, _OUTER), method=coded),
        "eager": arm("eager_diloco", (_INNER, _OUTER_LATE)),
        "delayed": arm("delayed_diloco", (_INNER, _OUTER_LATE)),
        "eager_light": arm(
            "eager_diloco", (_INNER, _OUTER_PLAIN), method={"outer": {"momentum": 0.3}}
        ),
        "muloco": arm("muloco", (_INNER, _OUTER)),
        "sparseloco": arm("sparseloco", (_INNER, _OUTER_PLAIN)),
        "noloco": arm("noloco", (_INNER, _OUTER_BETA), eval={"per_region": False}),
        "decoupled": arm("decoupled_momentum", (_INNER, _OUTER_PLAIN), method={"k": 80}),
        "adloco": arm("adloco", (_INNER, _OUTER_PLAIN)),
        "dilocox": arm(
            "dilocox", (_INNER, _OUTER_LATE), method={"adaptive": False}, mesh={"stage": 1}
        ),
        "streaming_light": arm(
            "streaming_diloco", (_INNER, _OUTER_PLAIN), method={**_FRAGMENTS, **light}
        ),
        "cocodc_light": arm("cocodc", (_INNER, _OUTER_PLAIN), method={**coded, **light}),
        "diloco_heavy": arm(
            "diloco", (_INNER, _OUTER), method={"outer": {"name": "heavy_ball", **heavy}}
        ),
        "quorum": arm("decoupled_diloco", (_INNER, _OUTER), method=unequal),
        "quorum_mean": arm("decoupled_diloco", (_INNER, _OUTER), method={**unequal, "merge": None}),
    }
    return tuned | {
        "diloco_e3m0": variant("diloco", method={"codec": "e3m0"}),
        "diloco_h60": variant("diloco", method={"period": 60}),
        "diloco_h480": variant("diloco", method={"period": 480}),
        "streaming_h60": variant("streaming", method={"period": 60}),
        "streaming_late": variant("streaming", method={"overlap": 10}),
        "streaming_often": variant("streaming", method={"period": 15}),
        "cocodc_early": variant("cocodc", method={"overlap": 1}),
        "cocodc_late": variant("cocodc", method={"overlap": 10}),
        "cocodc_often": variant("cocodc", method={"syncs_per_period": 6}),
        "cocodc_plain": variant("cocodc", method={"taylor": 0.0}),
        "cocodc_norm": variant("cocodc", method={"taylor": {"mode": "norm", "strength": 0.2}}),
        "dilocox_dense": variant("dilocox", method={"codec": None, "rank": None}),
        "dilocox_waits": variant("dilocox", method={"delay": 0}),
        "dilocox_rank4": variant("dilocox", method={"rank": 4}),
        "dilocox_h60": variant("dilocox", method={"period": 60}),
        "noloco_fours": variant("noloco", method={"group_size": 4}),
        "noloco_weak": variant("noloco", method={"gamma": 0.3}),
        "noloco_strong": variant("noloco", method={"gamma": 1.2}),
        "sparseloco_3": variant("sparseloco", method={"k": 128}),
        "adloco_apart": variant("adloco", method={"merge_every": None}),
        "adloco_fixed": variant("adloco", method={"inner_batching": {"name": "fixed", "start": 1}}),
        "muloco_dense": variant("muloco", method={"codec": "fp32"}),
        "muloco_2bit": variant("muloco", method={"bits": 2}),
        "quorum_strict": variant("quorum", method={"grace": 0.0}),
        "quorum_all": variant("quorum", method={"quorum": 4, "grace": 0.0}),
    }


def within(stages: dict) -> dict:
    """The part of a claim in all stages: in the given ones, with these fields, and in no other."""
    every = ("2_bytes", "2_regions", "2_variants", "3_regions", "3_variants", *_FIRST, *_FITTED)
    return dict.fromkeys(every) | stages


def varied(**fields: tuple) -> dict:
    """The part of a claim that is in `2_variants` and its five seeds, with these fields."""
    return within({"2_variants": fields, "3_seeds": _SMALL | fields, "3_variants": fields})


def claims() -> dict:
    """Each says that the final loss of `here` is at most (1 + margin) times that of `there`."""
    first = within({key: {} for key in _FIRST})
    fitted = first | {key: {} for key in ("2_regions", *_FITTED)}
    of_four = first | {key: {"regions": (4,)} for key in _FITTED}
    later = varied() | {"4_ladder": {}}
    wide = {"regions": (4, 8)}
    gossip = varied(**wide) | {"2_regions": {}, "3_regions": {}, "4_ladder": wide}
    return {
        "diloco_ddp": claim(
            "DiLoCo loses at most 1 % against data parallel training at equal tokens",
            "2311.08105; the gap shrinks with size: 2503.09799",
            "diloco",
            "ddp",
            0.01,
            "at more rounds or in larger models",
            published="equal perplexity at 500 times fewer bytes (H = 500, 8 regions); a gap that "
            "shrinks with size, at 20 tokens a parameter",
            again="configs/paper/diloco_period.py",
            stages=fitted,
        ),
        "streaming_diloco": claim(
            "Streaming DiLoCo in 4 bits loses at most 1 % against DiLoCo",
            "2501.18512",
            "streaming",
            "diloco",
            0.01,
            "at more rounds or in larger models",
            published="equal loss at 400 times fewer bytes than data parallel in bf16 (H = 100)",
            again="configs/paper/streaming_bytes.py",
            stages=of_four,
        ),
        "cocodc_streaming": claim(
            "CoCoDC has a lower loss than Streaming DiLoCo at equal bytes and tokens",
            "2504.17672",
            "cocodc",
            "streaming",
            0.0,
            "at more rounds, or with regions whose data differ more",
            published="21.0 % fewer steps to a target perplexity",
            again="configs/paper/cocodc_steps.py",
            stages=of_four,
        ),
        "eager_delayed": claim(
            "Eager updates have a lower loss than a naive delay of a round",
            "2502.12996",
            "eager",
            "delayed",
            0.0,
            "at more rounds or in larger models",
            published="eager 2.69 where DiLoCo has 2.68",
            again="configs/paper/eager_vs_delayed.py",
            stages=first,
        ),
        "eager_diloco": claim(
            "Eager updates lose at most 1 % against DiLoCo",
            "2502.12996",
            "eager",
            "diloco",
            0.01,
            "at more rounds",
            published="2.69 against 2.68",
            again="configs/paper/eager_vs_delayed.py",
            stages=first,
        ),
        "eager_light": claim(
            "Eager updates with an outer momentum of 0.3 lose at most 1 % against DiLoCo with 0.9",
            "2502.12996; the momentum is ours",
            "eager_light",
            "diloco",
            0.01,
            "at more rounds or in larger models",
            published="2.69 against 2.68, with 0.9",
            stages=later,
        ),
        "muloco_diloco": claim(
            "MuLoCo in 4 bits has a lower loss than DiLoCo",
            "2505.23725",
            "muloco",
            "diloco",
            0.0,
            "at more rounds or in larger models",
            published="a lower loss at equal steps with 8 times fewer bytes, in 2 bits",
            stages=first,
        ),
        "nesterov_averaging": claim(
            "An outer Nesterov step has a lower loss than plain averaging",
            "2311.08105",
            "diloco",
            "averaging",
            0.0,
            "at more rounds or in more regions",
            published="Nesterov the best of the outer optimizers tried",
            stages=first,
        ),
        "sparseloco_diloco": claim(
            "SparseLoCo at 1.6 % density has a lower loss than DiLoCo",
            "2508.15706",
            "sparseloco",
            "diloco",
            0.0,
            "at more rounds",
            published="a lower loss at 1 to 3 % density in 2 bits",
            again="configs/paper/sparseloco.py",
            stages=later,
        ),
        "noloco_diloco": claim(
            "NoLoCo has a lower loss than DiLoCo at equal H",
            "2506.10911",
            "noloco",
            "diloco",
            0.0,
            "at more rounds or in more regions",
            published="up to 4 % better at H = 50 than DiLoCo at H = 100",
            again="configs/paper/noloco_gossip.py",
            stages=gossip,
        ),
        "decoupled_diloco": claim(
            "Decoupled momentum, at a sixteenth of the bytes, loses at most 1 % against DiLoCo",
            "2510.03371",
            "decoupled",
            "diloco",
            0.01,
            "at more rounds or with more coefficients",
            published="up to 16 times fewer bytes",
            again="configs/paper/decoupled_momentum.py",
            stages=later,
        ),
        "dilocox_ddp": claim(
            "DiLoCoX, at rank 16 in 4 bits and a round late, loses at most 1 % against data "
            "parallel training",
            "2506.21263",
            "dilocox",
            "ddp",
            0.01,
            "at more rounds or in larger models",
            published="negligible, in the words of its abstract; 0.3 nats at 107B, second-hand",
            again="configs/paper/dilocox_ablation.py",
            stages=later,
        ),
        "adloco_diloco": claim(
            "AdLoCo, which communicates less and less, loses at most 1 % against DiLoCo at equal "
            "tokens",
            "2508.18182; the margin is ours",
            "adloco",
            "diloco",
            0.01,
            "at more rounds, as batches grow at the cost of steps",
            published="a lower perplexity at equal communications, see `adloco_exchanges`",
            again="configs/paper/adloco_communications.py",
            stages=later,
        ),
    }


def settings() -> dict:
    """What a setting of a method changes, at the rates that were tuned for the method."""
    only, eight = varied(), varied(regions=(8,))
    far = within({"2_bytes": {}})
    cocodc = "2504.17672"
    return {
        "diloco_bytes": claim(
            "DiLoCo at H = 480 and 1/480 of the bytes loses at most 1 % against data parallel "
            "training",
            "2311.08105",
            "diloco_h480",
            "ddp",
            0.01,
            "at more rounds, or at rates tuned for this H",
            published="equal perplexity at 500 times fewer bytes (H = 500, 8 regions)",
            stages=far,
        ),
        "streaming_bytes": claim(
            "Streaming DiLoCo at H = 60 in 4 bits, 1/400 of the bytes of data parallel training in "
            "fp32, loses at most 1 % against DiLoCo at H = 60",
            "2501.18512",
            "streaming_h60",
            "diloco_h60",
            0.01,
            "at more rounds, or at rates tuned for this H",
            published="equal loss at 400 times fewer bytes than data parallel in bf16 (H = 100)",
            stages=far,
        ),
        "adloco_exchanges": claim(
            "AdLoCo has a lower loss than DiLoCo at H = 480, which exchanges as often or less",
            "2508.18182",
            "adloco",
            "diloco_h480",
            0.0,
            "at more rounds, as batches grow at the cost of steps",
            published="a lower perplexity at equal communications",
            stages=within({"2_bytes": {"rounds": (96,)}}),
        ),
        "diloco_period": claim(
            "DiLoCo at H = 60 loses at most 1 % against H = 30",
            "2311.08105",
            "diloco_h60",
            "diloco",
            0.01,
            "at more rounds, or at rates tuned for this H",
            published="H = 1000 costs 2.9 % of the perplexity of H = 50",
            stages=far,
        ),
        "diloco_codec": claim(
            "DiLoCo in 4 bits (E3M0) loses at most 1 % against fp32",
            "2501.18512",
            "diloco_e3m0",
            "diloco",
            0.01,
            "at more rounds or in larger models",
            published="no loss of quality",
            stages=only,
        ),
        "muloco_codec": claim(
            "MuLoCo in 4 bits loses at most 1 % against fp32",
            "2505.23725",
            "muloco",
            "muloco_dense",
            0.01,
            "at more rounds or in larger models",
            stages=only,
        ),
        "muloco_bits": claim(
            "MuLoCo in 2 bits loses at most 1 % against 4 bits",
            "2505.23725",
            "muloco_2bit",
            "muloco",
            0.01,
            "at more rounds or in larger models",
            stages=only,
        ),
        "momentum_averaging": claim(
            "Outer momentum without a look-ahead has a lower loss than plain averaging",
            "2311.08105",
            "diloco_heavy",
            "averaging",
            0.0,
            "at more rounds or in more regions",
            stages=only,
        ),
        "cocodc_delay": claim(
            "CoCoDC with a delay of 10 steps loses at most 1 % against a delay of 1",
            cocodc,
            "cocodc_late",
            "cocodc_early",
            0.01,
            "at more rounds or in larger models",
            stages=only,
        ),
        "cocodc_streaming_late": claim(
            "CoCoDC has a lower loss than Streaming DiLoCo at a delay of 10 steps",
            cocodc,
            "cocodc_late",
            "streaming_late",
            0.0,
            "at more rounds or at a longer delay",
            stages=only,
        ),
        "cocodc_sends": claim(
            "CoCoDC has a lower loss with twice the sends of a period",
            cocodc,
            "cocodc_often",
            "cocodc",
            0.0,
            "at more rounds",
            stages=only,
        ),
        "cocodc_streaming_often": claim(
            "CoCoDC with twice the sends has a lower loss than Streaming DiLoCo with half the H",
            cocodc,
            "cocodc_often",
            "streaming_often",
            0.0,
            "at more rounds",
            stages=only,
        ),
        "cocodc_published": claim(
            "CoCoDC with twice the sends, and twice the bytes, has a lower loss than Streaming "
            "DiLoCo at equal H",
            cocodc,
            "cocodc_often",
            "streaming",
            0.0,
            "at more rounds, or with regions whose data differ more",
            published="21.0 % fewer steps to a target perplexity",
            stages=only,
        ),
        "cocodc_taylor": claim(
            "CoCoDC's compensation, lambda = 0.5, has a lower loss than none",
            cocodc,
            "cocodc",
            "cocodc_plain",
            0.0,
            "at more rounds or at a longer delay",
            stages=only,
        ),
        "cocodc_norm": claim(
            "CoCoDC's compensation, scaled by norms as we do, has a lower loss than none",
            cocodc,
            "cocodc_norm",
            "cocodc_plain",
            0.0,
            "at more rounds or at a longer delay",
            stages=only,
        ),
        "cocodc_streaming_light": claim(
            "CoCoDC has a lower loss than Streaming DiLoCo at outer momentum 0.5",
            cocodc,
            "cocodc_light",
            "streaming_light",
            0.0,
            "at more rounds",
            stages=only,
        ),
        "dilocox_codec": claim(
            "DiLoCoX at rank 16 in 4 bits loses at most 1 % against dense payloads",
            "2506.21263",
            "dilocox",
            "dilocox_dense",
            0.01,
            "at more rounds or in larger models",
            stages=only,
        ),
        "dilocox_rank": claim(
            "DiLoCoX at rank 4 loses at most 1 % against rank 16",
            "2506.21263",
            "dilocox_rank4",
            "dilocox",
            0.01,
            "at more rounds or in larger models",
            stages=only,
        ),
        "dilocox_period": claim(
            "DiLoCoX at H = 60 loses at most 1 % against H = 30",
            "2506.21263",
            "dilocox_h60",
            "dilocox",
            0.01,
            "at more rounds",
            stages=only,
        ),
        "dilocox_delay": claim(
            "DiLoCoX loses at most 1 % by applying its average a round late",
            "2506.21263",
            "dilocox",
            "dilocox_waits",
            0.01,
            "at more rounds, or at rates tuned without a delay",
            stages=only,
        ),
        "adloco_merging": claim(
            "AdLoCo has a lower loss with trainers that merge than without",
            "2508.18182",
            "adloco",
            "adloco_apart",
            0.0,
            "at more rounds",
            stages=only,
        ),
        "adloco_batches": claim(
            "AdLoCo has a lower loss with batches that grow than with one sequence a trainer to "
            "the end",
            "2508.18182",
            "adloco",
            "adloco_fixed",
            0.0,
            "at more rounds, as batches grow at the cost of steps",
            stages=only,
        ),
        "noloco_published": claim(
            "NoLoCo at H = 30 has a lower loss than DiLoCo at H = 60, with twice the bytes",
            "2506.10911",
            "noloco",
            "diloco_h60",
            0.0,
            "at more rounds or in more regions",
            published="up to 4 % better at H = 50 than DiLoCo at H = 100",
            stages=eight,
        ),
        "noloco_groups": claim(
            "NoLoCo in pairs loses at most 1 % against groups of four",
            "2506.10911",
            "noloco",
            "noloco_fours",
            0.01,
            "at more rounds or in more regions",
            stages=eight,
        ),
        "noloco_weak_pull": claim(
            "NoLoCo's anchors lie closer together at gamma = 0.3 than at 0.7: without gradients "
            "they would contract faster there",
            "2506.10911; the claim is ours, from lowcomm_jax/rules/consensus.py",
            "noloco_weak",
            "noloco",
            0.0,
            "at other lengths of a round, or in more regions",
            stages=eight,
            measure="anchor_variance",
        ),
        "noloco_strong_pull": claim(
            "NoLoCo's anchors lie closer together at gamma = 0.7 than at 1.2: without gradients "
            "they would contract faster there",
            "2506.10911; the claim is ours, from lowcomm_jax/rules/consensus.py",
            "noloco",
            "noloco_strong",
            0.0,
            "at other lengths of a round, or in more regions",
            stages=eight,
            measure="anchor_variance",
        ),
        "sparseloco_density": claim(
            "SparseLoCo at 3.1 % density has a lower loss than DiLoCo",
            "2508.15706",
            "sparseloco_3",
            "diloco",
            0.0,
            "at more rounds",
            stages=only,
        ),
        "quorum_waits": claim(
            "Decoupled DiLoCo has a lower loss if it waits for everyone than for one of four",
            "2604.21428; second-hand",
            "quorum_all",
            "quorum_strict",
            0.0,
            "at more rounds, or with learners whose data differ more",
            stages=only,
        ),
        "quorum_grace": claim(
            "Decoupled DiLoCo with a grace window loses at most 1 % against waiting for everyone",
            "2604.21428; second-hand",
            "quorum",
            "quorum_all",
            0.01,
            "at more rounds, or with learners whose data differ more",
            stages=only,
        ),
        "quorum_merge": claim(
            "Decoupled DiLoCo has a lower loss by radial-directional averaging than by the mean",
            "2604.21428; second-hand",
            "quorum",
            "quorum_mean",
            0.0,
            "at more rounds or in more regions",
            again="configs/paper/decoupled_grace.py",
            stages=only,
        ),
    }
