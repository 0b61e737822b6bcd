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
    from regions.process_methods import METHODS
    from regions.together import batches, engine, rows, train

    from lowcomm_jax import exchange, make_mesh

    transport = exchange.peers() if settings.exchange == "peers" else None
    place = settings.url, settings.region, settings.regions, "run"
    one = exchange.store(*place, transport=transport)
    mesh = make_mesh(fsdp=jax.device_count())
    trainer = engine(METHODS[settings.method](), settings.regions, one, mesh)
    one.join(60.0)
    data = [rows(x, settings.region) for x in batches(settings.steps, settings.regions)]
    ends = train(trainer, data)
    named = {}
    for at, parts in enumerate(ends):
        for kind, tree in zip(("anchor", "params"), parts):
            named |= {f"{at}/{kind}/{k}": x for k, x in tree.items()}
    one.close()
    np.savez(settings.out, **named)


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
