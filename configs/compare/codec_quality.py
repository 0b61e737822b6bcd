"""What compression costs: final loss against bytes, at equal tokens.

    python -m experiments compare --config=configs/compare/codec_quality.py --workdir=runs/codecs

Claims: 4-bit payloads are lossless (Streaming DiLoCo's E3M0, arXiv 2501.18512; MuLoCo's codebook,
2505.23725), 2 bits with error feedback nearly so; SparseLoCo (2508.15706) at 1 to 3 % density beats
dense DiLoCo. We ask for 0.5 % of the loss of dense DiLoCo with 4 bits and 1 % with SparseLoCo.

What is compared, four regions, three seeds, a synchronisation every H = 15 steps, 40 in all:
- `diloco`: fp32, Nesterov 0.7 / 0.9, AdamW inside; the baseline. `diloco_stat4`, `diloco_e3m0`: the
  same with 4-bit payloads without feedback; `diloco_stat2_ef`: 2 bits, feedback 0.95.
- `averaging`: fp32, plain averaging. `sparseloco`: the same with 1.56 % of the entries in 2 bits,
  feedback 0.95.
- `muon`: fp32, Nesterov 0.7 / 0.6, Muon inside. `muloco_4`, `muloco_2`: the same in 4 and 2 bits,
  feedback 0.95.

A panel holds one method and its codecs, so that the difference within it is the codec's; the last
one holds all against dense DiLoCo. The papers' outer settings are used as they are, none is tuned.

Sizes, `--config.size=`:
- `nano` (default): the laptop model (1M parameters), context 128, 600 steps. 27 runs of about a
  minute each on two cores: half an hour in all, less with `--config.parallel=2`.
- `small`: 0.18M parameters, context 64, 720 steps, H = 30: minutes, to see that everything runs.
- `gpu`: 35M parameters on C4, H = 50, 4000 steps. Not run by us.

`small` (five and a half minutes on two idle cores), final loss ± 95 % over three seeds, and its
difference from the dense method above:

=============== ============= ============== ====
variant         loss          difference     MB
=============== ============= ============== ====
diloco          2.088 ± 0.050                26
diloco_stat4    2.091         +0.003 ± 0.053 3.5
diloco_e3m0     2.102         +0.014 ± 0.042 3.6
diloco_stat2_ef 2.104         +0.016 ± 0.087 1.7
averaging       2.001 ± 0.035                26
sparseloco      2.359 ± 0.013 +0.358 ± 0.037 0.40
muon            1.911 ± 0.038                26
muloco_4        1.916         +0.005 ± 0.017 3.5
muloco_2        2.019         +0.108 ± 0.024 1.7
=============== ============= ============== ====

Intervals of 2 to 3 % of the loss cannot show half a percent.
"""

from ml_collections import ConfigDict

from configs.compare import cocodc_vs_streaming as study
from experiments.compare.config import comparison, panel, variant

DILOCO = {"name": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
MULOCO = {**DILOCO, "momentum": 0.6}


def get_config() -> ConfigDict:
    """Give the config."""
    return comparison(
        size="nano",
        sizes={
            "nano": quality(period=15, common=study.nano(steps=600)),
            "small": quality(period=30, common=study.small(steps=720)),
            "gpu": quality(period=50, common=study.gpu(steps=4000), batch=32),
        },
        keep_checkpoints=False,
    )


def quality(period: int, common: dict, batch: int = study.BATCH) -> dict:
    """Variants and panels with H = `period`."""
    every = {"period": period}
    on_diloco = {"diloco": None, "diloco_stat4": "stat4", "diloco_e3m0": "e3m0"}
    on_diloco["diloco_stat2_ef"] = "stat2_ef"
    variants = {
        name: variant("diloco", method={"outer": DILOCO, "codec": codec, **every})
        for name, codec in on_diloco.items()
    }
    variants |= {
        "averaging": variant("local_sgd", method=every),
        "sparseloco": variant("sparseloco", method=every),
        "muon": variant("diloco", method={"outer": MULOCO, **every}, inner={"optimizer": "muon"}),
        "muloco_4": variant("muloco", method={"outer": MULOCO, "bits": 4, **every}),
        "muloco_2": variant("muloco", method={"outer": MULOCO, "bits": 2, **every}),
    }
    return {
        "common": common | {"regions": study.REGIONS, "batch": batch},
        "variants": variants,
        "panels": {
            "1_diloco": panel("codecs on DiLoCo", tuple(on_diloco), "diloco"),
            "2_sparse": panel("1.56 % in 2 bits", ("averaging", "sparseloco"), "averaging"),
            "3_muon": panel("codecs on Muon", ("muon", "muloco_4", "muloco_2"), "muon"),
            "4_all": panel("all against dense DiLoCo", tuple(variants), "diloco"),
        },
        "baseline": "diloco",
    }
