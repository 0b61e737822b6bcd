"""Claim: Streaming DiLoCo with 4 bits loses nothing against data parallel, at 1/400 of the bytes.

    python -m experiments compare --config=configs/paper/streaming_bytes.py --workdir=runs/streaming

Paper: arXiv 2501.18512, evaluation loss on C4:

| parameters | data parallel | DiLoCo, H = 30 | Streaming, E3M0, H = 30 | H = 100 |
| --- | --- | --- | --- | --- |
| 1B | 2.49 | 2.49 | 2.48 | 2.50 |
| 35M | 3.51 | 3.54 | 3.53 | 3.56 |

The 400 is 100 (H) x 4 (16 bits to 4).

Equal tokens, four regions: AllReduce, DiLoCo, Streaming (K = 3, tau = 1, alpha 0.5) dense and in
E3M0 at H, and in E3M0 at 4 H. Expected at `small` (24 rounds): the codec costs little, and every
method that synchronises seldom is behind AllReduce, which has had 720 updates in common.

Measured (`small`, three seeds, 13 minutes on two busy cores):

| method | loss | MB sent |
| --- | --- | --- |
| AllReduce | 1.767 ± 0.009 | 781 |
| DiLoCo | 2.066 ± 0.039 | 26 |
| Streaming, fp32 | 1.965 ± 0.059 | 27 |
| Streaming, E3M0 | 1.972 ± 0.052 | 3.7 (1/211) |
| Streaming, E3M0, 4 H | 2.044 ± 0.035 | 1.04 (1/754) |

E3M0 against fp32: +0.007 ± 0.009.
"""

from ml_collections import ConfigDict

from configs.paper.scales import NETWORK, nesterov, reproduction
from experiments.compare.config import panel, variant


def get_config() -> ConfigDict:
    """Give the config."""
    return reproduction(variants, **NETWORK)


def variants(common: dict, period: int) -> dict:
    """AllReduce and what sends less."""
    streams = {"fragments": 3, "overlap": 1, "alpha": 0.5, "outer": nesterov(0.7)}

    def streaming(codec: str | None, times: int = 1) -> dict:
        method = {**streams, "period": times * period, "codec": codec}
        return variant("streaming_diloco", method=method)

    found = {
        "allreduce": variant("ddp"),
        "diloco": variant("diloco", method={"period": period, "outer": nesterov()}),
        "streaming": streaming(None),
        "streaming_e3m0": streaming("e3m0"),
        "streaming_e3m0_4h": streaming("e3m0", 4),
    }
    panels = {
        "1": panel("against AllReduce", tuple(found), "allreduce"),
        "2": panel("the codec alone", ("streaming", "streaming_e3m0"), "streaming"),
    }
    return {"common": common, "variants": found, "panels": panels, "baseline": "allreduce"}
