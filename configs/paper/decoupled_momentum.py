"""Claim: with decoupled momentum DiLoCo sends up to 16 times less.

    python -m experiments compare --config=configs/paper/decoupled_momentum.py --workdir=runs/dm

Paper: arXiv 2510.03371 (language and vision models, H = 128; its body was not at hand, the settings
are those of its code).

Equal tokens, four regions: averaging and DiLoCo, dense; decoupled momentum in both readings
(`lowcomm_jax.methods.decoupled_momentum`), 32 of 4096 coefficients. Expected at `small`: far fewer
bytes than 1/16 of DiLoCo's, and a higher loss, because 24 rounds leave most of the residual unsent.

Measured (`small`, three seeds, 6 minutes on two cores):

| variant | loss | MB sent |
| --- | --- | --- |
| averaging | 2.001 ± 0.035 | 26 |
| DiLoCo | 2.066 ± 0.039 | 26 |
| decoupled | 2.279 ± 0.048 | 0.64 (1/41) |
| decoupled, 512 coefficients | 1.947 ± 0.028 | 9.1 |
| decoupled, as coded | 4.62 ± 3.35 | |

Keeping 1/8 of the coefficients beats DiLoCo (-0.120 ± 0.059) at a third of its bytes; with 1/128 it
loses. The coded reading is unstable.
"""

from ml_collections import ConfigDict

from configs.paper.scales import NETWORK, nesterov, reproduction
from experiments.compare.config import panel, variant


def get_config() -> ConfigDict:
    """Give the config."""
    return reproduction(variants, full_period=128, **NETWORK)


def variants(common: dict, period: int) -> dict:
    """Dense methods and both readings."""
    found = {
        "averaging": variant("local_sgd", method={"period": period}),
        "diloco": variant("diloco", method={"period": period, "outer": nesterov()}),
        "decoupled": variant("decoupled_momentum", method={"period": period}),
        "decoupled_512": variant("decoupled_momentum", method={"period": period, "k": 512}),
        "as_coded": variant("decoupled_momentum", method={"period": period, "variant": "as_coded"}),
    }
    panels = {"1": panel("decoupled momentum", tuple(found), "diloco")}
    return {"common": common, "variants": found, "panels": panels, "baseline": "diloco"}
