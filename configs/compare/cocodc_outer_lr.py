"""The outer learning rates of cocodc_vs_streaming: the same budget for each method family.

    python -m experiments compare --config=configs/compare/cocodc_outer_lr.py --workdir=runs/lr

Four rates for each of DiLoCo, Streaming DiLoCo (alpha 0.5) and CoCoDC (lambda 0.5, N = K), at
tau = 5, with one seed and half the steps of the study. The rate of the lowest final loss is written
into configs/compare/cocodc_vs_streaming.py by hand.

Takes about 2 minutes of one core at size `small`. Final evaluation loss found there:

| rate | DiLoCo | Streaming | CoCoDC |
| --- | --- | --- | --- |
| 0.2 | 2.462 | 2.393 | 2.465 |
| 0.4 | **2.315** | 2.268 | **2.366** |
| 0.7 | 2.352 | **2.232** | 2.430 |
| 1.0 | 2.450 | 2.273 | 2.651 |
"""

from ml_collections import ConfigDict

from configs.compare import cocodc_vs_streaming as study
from experiments.compare.config import comparison, panel, variant

GRID = (0.2, 0.4, 0.7, 1.0)


def get_config() -> ConfigDict:
    """Give the config."""
    return comparison(
        seeds=(0,),
        size="small",
        sizes={
            "small": search(period=30, fragments=3, common=study.small(steps=360)),
            "nano": search(period=30, fragments=3, common=study.nano(steps=450)),
            "gpu": search(period=100, fragments=4, common=study.gpu(steps=2000), batch=32),
        },
        keep_checkpoints=False,
    )


def search(period: int, fragments: int, common: dict, batch: int = study.BATCH) -> dict:
    """Variants and panels with H = `period` and K = `fragments`."""
    overlapped = {"overlap": 5, "fragments": fragments}
    families = {
        "diloco": ("diloco", {}),
        "streaming": ("streaming_diloco", {"alpha": 0.5, "codec": None, **overlapped}),
        "cocodc": ("cocodc", {"taylor": 0.5, "syncs_per_period": fragments, **overlapped}),
    }
    variants, panels = {}, {}
    for family, (config, knobs) in families.items():
        names = []
        for rate in GRID:
            outer = {**study.outer(family), "learning_rate": rate}
            name = f"{family}_lr{round(100 * rate):03}"
            variants[name] = variant(config, method={"period": period, "outer": outer, **knobs})
            names.append(name)
        panels[family] = panel(family, tuple(names), names[1])
    return {
        "common": common | {"regions": study.REGIONS, "batch": batch},
        "variants": variants,
        "panels": panels,
        "baseline": "diloco_lr040",
    }
