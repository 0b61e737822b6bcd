"""LOSCAR-SGD's landing, GASLoC and EDiT, each against the method that it changes.

    python -m experiments compare --config=configs/compare/rules_of_2026.py --workdir=runs/rules

Three seeds, equal tokens, four regions, 0.18M parameters, 720 steps (`small` of
configs/compare/cocodc_vs_streaming.py). Not run by us yet.

- `landing`: SPARTA averages 0.5 % of the parameters after every step, and the mean lands 10 steps
  later. `mean` drops what a region has made of these entries meanwhile, `replay` keeps it. Bytes
  are equal. `at_once` has no delay.
- `gossip`: NoLoCo against GASLoC, pairs, H = 30, at equal bytes. GASLoC's coefficients are ours.
- `norms`: DiLoCo against EDiT, H = 30. EDiT costs 3 payloads here, a reduced mean 1.5. The warm-up
  of 120 rounds is longer than the run's 24, so `edit` has 5.
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
    }
    return comparison(
        variants,
        baseline="diloco",
        panels={
            "landing": panel("SPARTA's landing", ("at_once", "mean", "replay"), "mean"),
            "gossip": panel("gossip", ("noloco", "gasloc"), "noloco"),
            "norms": panel("weights of norms", ("diloco", "edit"), "diloco"),
        },
        common=study.small(steps=720) | {"regions": study.REGIONS, "batch": study.BATCH},
        seeds=(0, 1, 2),
        keep_checkpoints=False,
    )
