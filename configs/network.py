"""Networks as configs: `--config=configs/network.py:intercontinental`, or a copy as your own.

Presets: lan, datacenter, us_4_regions, consumer_1gbps, intercontinental, aws, aws:Oregon,Tokyo,...
Any mapping with these fields is a network; files in YAML use the same ones.
"""

from ml_collections import ConfigDict

from lowcomm_jax.network.links import Network
from lowcomm_jax.network.parse import preset


def get_config(name: str = "us_4_regions") -> ConfigDict:
    """Give a preset as an editable config."""
    return as_config(preset(name))


def as_config(network: Network) -> ConfigDict:
    """Write a network as the config that `lowcomm_jax.network.parse` reads back."""
    limit = lambda values: [None if value == float("inf") else value for value in values.tolist()]  # noqa: E731
    return ConfigDict(
        {
            "name": network.name,
            "regions": list(network.regions),
            "symmetric": False,
            "bandwidth_gbps": network.bandwidth_RxR.tolist(),
            "delay_ms": (network.delay_RxR * 1e3).tolist(),
            "loss": network.loss_RxR.tolist(),
            "egress_gbps": limit(network.egress_R),
            "ingress_gbps": limit(network.ingress_R),
            "compute_s": network.compute_R.tolist(),
            "compute_jitter": {
                "kind": network.compute_jitter.kind,
                "scale": network.compute_jitter.scale,
            },
            "transfer_jitter": {
                "kind": network.transfer_jitter.kind,
                "scale": network.transfer_jitter.scale,
            },
            "sync_constant_s": network.sync_constant_s,
            "first_use_s": network.first_use_s,
            "control_bytes": network.control_bytes,
            "control_rate": network.control_rate,
            "source": network.source,
            "confidence": network.confidence,
        }
    )
