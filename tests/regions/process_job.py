"""One process of a region's job: trains the small problem of `together`, and writes what it has.

Run as `python -m regions.process_job '{...}'`; see `Settings`.
"""

import dataclasses
import json
import sys

import jax


@dataclasses.dataclass
class Settings:
    """Of one process.

    Attributes:
      url: of the rendezvous; out: file for what the anchors and the parameters end with.
      region, regions; process, processes; coordinator: which process of what.
      method: a key of `METHODS`.
    """

    url: str
    out: str
    region: int
    regions: int
    process: int
    processes: int
    coordinator: str
    method: str
    steps: int
    exchange: str


def main(settings: Settings) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    if settings.processes > 1:
        jax.distributed.initialize(
            settings.coordinator,
            settings.processes,
            settings.process,
            heartbeat_timeout_seconds=600,  # a busy machine may stand still
        )
    # The suite imports JAX with settings of its own; these need its devices.
    import numpy as np

    from lowcomm_jax import make_mesh

    np.savez(settings.out, **trained(settings, make_mesh(fsdp=jax.device_count())))


def trained(settings: Settings, mesh):
    """What a process ends with: `STAGE/TREE/LEAF` -> values; stage 1 is after `finish`."""
    from regions.process_methods import METHODS
    from regions.together import batches, engine, rows, train

    from lowcomm_jax import exchange

    transport = exchange.peers() if settings.exchange == "peers" else None
    place = settings.url, settings.region, settings.regions, "run"
    one = exchange.store(*place, transport=transport)
    trainer = engine(METHODS[settings.method](), settings.regions, one, mesh)
    one.join(60.0)
    data = [rows(x, settings.region) for x in batches(settings.steps, settings.regions)]
    ends = train(trainer, data)
    one.close()
    return {
        f"{stage}/{tree}/{leaf}": x
        for stage, trees in enumerate(ends)
        for tree, leaves in zip(("anchor", "params"), trees)
        for leaf, x in leaves.items()
    }


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
