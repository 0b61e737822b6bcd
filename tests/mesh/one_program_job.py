"""One process of a program over several: trains cases of `same_as`, and writes what they come to.

Run as `python -m mesh.one_program_job '{...}'`; see `Settings`. The results of one process and of
several can then be compared, field by field.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import traceback

import jax


@dataclasses.dataclass
class Settings:
    """Of one process.

    Attributes:
      folder: for checkpoints (one a case), and for results (one file a process).
      process, processes, coordinator: which one of how many.
      devices: of this process.
      cases: names of `one_program_cases.cases`.
    """

    folder: str
    process: int
    processes: int
    coordinator: str
    devices: int
    cases: list[str]


def result_of(folder: pathlib.Path, process: int) -> pathlib.Path:
    return folder / f"results.{process}.json"


def main(settings: Settings) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", settings.devices)
    if settings.processes > 1:
        jax.distributed.initialize(
            settings.coordinator,
            settings.processes,
            settings.process,
            heartbeat_timeout_seconds=600,  # a busy machine may stand still
        )
    # The suite imports JAX with settings of its own; these need its devices.
    from mesh.one_program_cases import cases
    from same_as_probe import in_one_process, json_digest

    from lowcomm_jax.checkpoint import Checkpoints, store
    from lowcomm_jax.checkpoint.child_process import outside_job
    from lowcomm_jax.mesh.leader import leader

    def saved_digests(own):
        """Of every array of the newest checkpoint, whoever wrote which part of it."""
        with Checkpoints(own) as checkpoints:
            path, document = own / str(checkpoints.latest()), checkpoints.document()
        arrays = outside_job(store.read_arrays, store.epath.Path(path), document)
        return {name: store.digest(array) for name, array in arrays.items()}

    folder, found = pathlib.Path(settings.folder), {}
    known = cases()
    for name in settings.cases:
        own = folder / name.replace(" ", "_")
        try:
            found[name] = in_one_process(known[name], own, own, own=True)
            if known[name].saved:
                digests = leader().broadcast_from_leader(
                    "digests", functools.partial(saved_digests, own)
                )
                found[name]["checkpoint"] = {"arrays": json_digest(digests)}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        jax.clear_caches()
    result_of(folder, settings.process).write_text(json.dumps(found))


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
