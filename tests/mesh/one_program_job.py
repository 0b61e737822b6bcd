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
      quick: whether all calls that leave the job share a child process (`OneChild`), and the first
        process compiles for all (`compile_once`).
    """

    folder: str
    process: int
    processes: int
    coordinator: str
    devices: int
    cases: list[str]
    quick: bool


def result_of(folder: pathlib.Path, process: int) -> pathlib.Path:
    return folder / f"results.{process}.json"


def compile_once():
    """The first process compiles what all run, and sends it to the others.

    They ask for it by the key of JAX's cache. A part of that is another one in each process: in its
    place stands here which device is whose. Who comes to another program waits in vain, and fails.
    """
    from jax._src import cache_key

    def whose(hashed, devices):
        hashed.update(str([device.process_index for device in devices.flat]).encode())

    cache_key._hash_accelerator_config = whose
    jax.config.update("jax_share_binary_between_hosts", True)
    jax.config.update("jax_share_binary_between_hosts_timeout_ms", 300_000)


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
    from same_as_probe import in_one_process

    from lowcomm_jax.checkpoint import Checkpoints, store
    from lowcomm_jax.mesh.leader import leader

    def saved_digests(own):
        """Of every array of the newest checkpoint, whoever wrote which part of it."""
        with Checkpoints(own) as checkpoints:
            path, document = own / str(checkpoints.latest()), checkpoints.document()
        arrays = store.read_arrays(store.epath.Path(path), document)
        return {name: store.digest(array) for name, array in arrays.items()}

    if settings.quick and settings.processes > 1:
        compile_once()
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
                found[name]["checkpoint"] = digests
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        jax.clear_caches()
    result_of(folder, settings.process).write_text(json.dumps(found, default=store.digest))


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
