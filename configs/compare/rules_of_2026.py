"""Rules of 2026, and EDiT, each against the method that it changes.

    python -m experiments compare --config=configs/compare/rules_of_2026.py --workdir=runs/rules

Three seeds, equal tokens, four regions, 0.18M parameters, 720 steps, H = 30 (`small` of
configs/compare/cocodc_vs_streaming.py). Rates are not tuned, and GASLoC's coefficients are ours.
Twenty minutes on two cores that had other work.

Final loss +- 95 % over three seeds, difference paired by seed, MB sent a region:

============ ============= ========================= ====
variant      loss          difference                MB
============ ============= ========================= ====
at_once      2.063 ± 0.029 -0.027 ± 0.035, mean      5.06
mean         2.090 ± 0.039                           5.06
replay       2.078 ± 0.038 -0.012 ± 0.044, mean      5.06
noloco       2.014 ± 0.018                           34.7
gasloc       2.042 ± 0.064 +0.027 ± 0.075, noloco    34.7
diloco       1.969 ± 0.037                           26.0
edit         1.988 ± 0.049 +0.019 ± 0.014, diloco    26.0
pulseloco    2.134 ± 0.022 +0.165 ± 0.017, diloco    4.59
pulseloco_16 2.625 ± 0.057 +0.656 ± 0.029, diloco    0.32
partial      2.177 ± 0.058 +0.208 ± 0.021, diloco    26.0
decoupled    1.974 ± 0.041                           53.5
a_edit       2.001 ± 0.036 +0.027 ± 0.070, decoupled 26.0
============ ============= ========================= ====

- LOSCAR-SGD's landing: SPARTA averages 0.5 % of the parameters after every step, and the mean lands
  10 steps later. `mean` drops what a region has made of these entries meanwhile, `replay` keeps it;
  `at_once` has no delay. Differences have the expected sign, and three seeds do not show them.
- GASLoC and NoLoCo, pairs: no evidence of a difference.
- EDiT sends what DiLoCo does, and a norm a tensor. Its warm-up of 120 rounds is longer than the
  run's 24, so `edit` has 5. Nothing here makes outliers for it to leave out.
- PULSELoCo with 256 and 16 places for each chunk of 4,096 entries. At rates of pre-training nearly
  every entry passes the gate, so that the places decide what travels (configs/pulseloco.py).
- A-EDiT and Decoupled DiLoCo where the slowest region steps at half the speed: no evidence of a
  difference. Both see 571k tokens, others 737k.
- Partial updates: each region trains a quarter of the columns of every MLP matrix.
"""

from ml_collections import ConfigDict

from configs.compare import cocodc_vs_streaming as study
from experiments.compare.config import comparison, panel, variant

LATE = {"p": 0.005, "delay": 10}
OUTER = {"name": "nesterov", "learning_rate": 0.7, "momentum": 0.5}


def get_config() -> ConfigDict:
    """Give the config."""
    variants = {
        "at_once": variant("sparta", method={"p": 0.005}),
        "mean": variant("sparta", method=LATE),
        "replay": variant("sparta", method={**LATE, "landing": "replay"}),
        "noloco": variant("noloco", method={"period": 30, "codec": None}),
        "gasloc": variant("gasloc", method={"period": 30}),
        "diloco": variant("diloco", method={"period": 30, "outer": OUTER}),
        "edit": variant("edit", method={"period": 30, "outer": OUTER, "warm_up": 5}),
        "pulseloco": variant("pulseloco", method={"period": 30, "outer": OUTER}),
        "pulseloco_16": variant("pulseloco", method={"period": 30, "outer": OUTER, "k": 16}),
        "decoupled": variant(
            "decoupled_diloco", method={"period": 30, "fragments": 3, "outer": OUTER, "outages": ()}
        ),
        "a_edit": variant("a_edit", method={"outer": OUTER, "warm_up": 5}),
        "partial": variant("partial_updates", method={"period": 30, "outer": OUTER}),
    }
    return comparison(
        variants,
        baseline="diloco",
        panels={
            "landing": panel("SPARTA's landing", ("at_once", "mean", "replay"), "mean"),
            "gossip": panel("gossip", ("noloco", "gasloc"), "noloco"),
            "norms": panel("weights of norms", ("diloco", "edit"), "diloco"),
            "gate": panel("a gate of bf16", ("diloco", "pulseloco", "pulseloco_16"), "diloco"),
            "ticks": panel("unequal speeds", ("decoupled", "a_edit"), "decoupled"),
            "roles": panel("parts of the MLPs", ("diloco", "partial"), "diloco"),
        },
        common=study.small(steps=720) | {"regions": study.REGIONS, "batch": study.BATCH},
        seeds=(0, 1, 2),
        keep_checkpoints=False,
    )
