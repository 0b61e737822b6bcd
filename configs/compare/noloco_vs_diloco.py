"""NoLoCo against DiLoCo: 8 and 16 regions, H of 50 and 100, the coefficients of NoLoCo's code.

    python -m experiments compare --config=configs/compare/noloco_vs_diloco.py --workdir=runs/n
    python -m experiments report runs/n/noloco_r08_h050/seed0 runs/n/diloco_r08_h100/seed0 \
        --network=configs/compare/lognormal_8.yaml --step_seconds=0.05

The first shows loss at equal tokens and the bytes sent; the second replays finished runs in
virtual time under log-normal transfer times (`lognormal_16.yaml` for 16 regions).

Paper: NoLoCo, arXiv 2506.10911. Claim: up to 4 % better perplexity than DiLoCo, close to data
parallel training, and exchanges about 10 times faster at some hundred accelerators. Its code
trains NoLoCo with H = 50, pairs, alpha 0.5, beta = gamma = 0.7, and DiLoCo with H = 100, momentum
0.3, rate 0.7, both heavy ball.

What is compared, each with 8 and 16 regions, equal tokens and three seeds:
- `noloco`: pairs. Its fp32 pseudo-gradients and anchors are 8 bytes a parameter and round, DiLoCo's
  two-shot reduction 7 to 7.5. So equal H is about equal bytes, and the published pairing (H 50
  against 100) gives NoLoCo twice as many.
- `diloco`: as in that code. `nesterov`: DiLoCo with look-ahead, 0.4 / 0.9, the best outer rule of
  configs/compare/cocodc_outer_lr.py (4 regions, H = 30).
- The groups of a round are the same with every seed of the run.

Sizes, `--config.size=`: those of configs/compare/cocodc_vs_streaming.py.
- `small` (default): 0.18M parameters, 800 steps. 36 runs, an hour on two busy cores.
- `nano`: the laptop model, 1000 steps; hours. Not run by us.
- `gpu`: 35M parameters on C4, 4000 steps. Not run by us.

`small`, final loss ± 95 % over three seeds, and MB sent by a region:

=========== ===================== ===================== =====================
regions, H  noloco                diloco                nesterov
=========== ===================== ===================== =====================
8, 50       2.012 ± 0.012, 23.1   2.005 ± 0.016, 20.2   2.050 ± 0.010
8, 100      2.074 ± 0.015, 11.6   2.041 ± 0.010, 10.1   2.126 ± 0.012
16, 50      2.143 ± 0.011, 23.1   2.143 ± 0.024, 21.7   2.160 ± 0.034
16, 100     2.229 ± 0.014, 11.6   2.203 ± 0.019, 10.8   2.256 ± 0.018
=========== ===================== ===================== =====================

NoLoCo's loss less DiLoCo's, paired by seed:

=====================  ===============  ===============
H of NoLoCo, DiLoCo    8 regions        16 regions
=====================  ===============  ===============
50, 50 (no evidence)   +0.007 ± 0.027   +0.0002 ± 0.013
100, 100               +0.034 ± 0.021   +0.026 ± 0.009
50, 100 (published)    -0.029 ± 0.021   -0.060 ± 0.014
=====================  ===============  ===============

The published pairing gives NoLoCo twice the bytes. Seed 0 was replayed at H = 50 under log-normal
delays, with steps of 0.05 s. NoLoCo takes 42 s of virtual time with 8 regions and 42 s with 16,
DiLoCo 45 s and 47 s. NoLoCo waits 1 s for bytes, DiLoCo 5 and 7 s.
"""

from ml_collections import ConfigDict

from configs.compare import cocodc_vs_streaming as study
from experiments.compare.config import comparison, panel, variant

REGIONS, PERIODS, BATCH = (8, 16), (50, 100), 32  # sequences of all regions together


def get_config() -> ConfigDict:
    """Give the config."""
    return comparison(
        size="small",
        sizes={
            "small": versus(study.small(steps=800)),
            "nano": versus(study.nano(steps=1000)),
            "gpu": versus(study.gpu(steps=4000), batch=256),
        },
        keep_checkpoints=False,
    )


def versus(common: dict, batch: int = BATCH, counts: tuple[int, ...] = REGIONS) -> dict:
    """Variants and panels, with every number of regions of `counts`."""
    variants, panels = {}, {}
    for regions in counts:
        for period in PERIODS:
            for name, (config, knobs) in methods().items():
                changes = {"regions": regions, "batch": batch // regions}
                changes["method"] = {"period": period, **knobs}
                variants[label(name, regions, period)] = variant(config, **changes)
            panels[f"r{regions:02}_h{period:03}"] = panel(
                f"{regions} regions, H = {period}",
                tuple(label(name, regions, period) for name in methods()),
                label("diloco", regions, period),
            )
        panels[f"r{regions:02}_published"] = panel(
            f"{regions} regions, NoLoCo at H = 50 against DiLoCo at H = 100, as published",
            (label("noloco", regions, 50), label("diloco", regions, 100)),
            label("diloco", regions, 100),
        )
    return {
        "common": common,
        "variants": variants,
        "panels": panels,
        "baseline": label("diloco", 8, 100),
    }


def methods() -> dict:
    """Name -> (config, fields of its method)."""
    heavy = {"name": "heavy_ball", "learning_rate": 0.7, "momentum": 0.3}
    ahead = {"name": "nesterov", "learning_rate": 0.4, "momentum": 0.9}
    return {
        "noloco": ("noloco", {"alpha": 0.5, "beta": 0.7, "gamma": 0.7, "codec": None}),
        "diloco": ("diloco", {"outer": heavy}),
        "nesterov": ("diloco", {"outer": ahead}),
    }


def label(name: str, regions: int, period: int) -> str:
    return f"{name}_r{regions:02}_h{period:03}"
