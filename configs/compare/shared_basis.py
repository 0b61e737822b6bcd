"""DiLoCoX's low-rank payloads on bases of each region's own against one basis that all agree on.

    python -m experiments compare --config=configs/compare/shared_basis.py --workdir=runs/bases

Own bases travel in one exchange and the mean of four regions has four times the rank; one shared
basis (PowerSGD's two phases, arXiv 1905.13727) waits for two, and the mean has the rank it was sent
with. Each with rank and H adapting to the measured rank (AdaGradCmp, arXiv 2506.21263) and without.
Equal tokens; the outer rule is that of configs/paper/dilocox_ablation.py.

Measured (`small`, three seeds, ten minutes on two busy cores), loss and MB sent: fixed rank, own
bases 2.307 ± 0.027, 2.8; shared 2.328 ± 0.020, 2.8, by seed +0.021 ± 0.028; adaptive, own
2.286 ± 0.025, 3.7; shared 2.295 ± 0.034, 3.4, by seed +0.009 ± 0.024: no evidence of a difference.
With the outer momentum 0.9 both adaptive ones diverge after a hundred steps.
"""

from ml_collections import ConfigDict

from configs.paper.scales import nesterov, reproduction
from experiments.compare.config import panel, variant


def get_config() -> ConfigDict:
    """Give the config."""
    return reproduction(variants, networks=("consumer_1gbps",), step_seconds=0.02)


def variants(common: dict, period: int) -> dict:
    """Own and shared bases, of a fixed rank and of one that adapts."""
    shared = {"period": period, "outer": nesterov(0.4, 0.3), "rank": 16}
    found = {
        f"{bases}_{rank}": variant(
            "dilocox",
            method={**shared, "shared_basis": bases == "shared", "adaptive": adaptive},
            mesh={"stage": 1},
        )
        for bases in ("own", "shared")
        for rank, adaptive in (("fixed", False), ("adaptive", {"buckets": 3}))
    }
    panels = {
        rank: panel(f"{rank} rank", (f"own_{rank}", f"shared_{rank}"), f"own_{rank}")
        for rank in ("fixed", "adaptive")
    }
    return {"common": common, "variants": found, "panels": panels, "baseline": "own_fixed"}
