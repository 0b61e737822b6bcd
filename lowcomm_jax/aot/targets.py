"""Accelerators that need not be there: their devices, for XLA to compile for, and their limits.

`Target.parse("h100:2x8")` describes a machine; `Target.devices` are devices without memory, which a
mesh can be made of. Rates are bytes a second and direction. GPUs need `jax-cuda12-plugin` and
`nvidia-cuda-nvcc-cu12`, TPUs `libtpu`: the extra `aot` installs all of them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Sequence

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from lowcomm_jax.mesh.regions import make_mesh
from lowcomm_jax.refused import is_unknown


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Public facts of one device.

    Attributes:
      platform: `gpu` or `tpu`.
      kind: JAX's name of the device.
      memory_bytes: memory that the driver gives a process.
      room: the part of it that a program may use.
      flops: peak bfloat16 matrix operations a second, dense.
      memory_rate: from its own memory.
      link_rate: to the other devices of its host (NVLink) or slice (ICI).
      card_rate: GPUs: of a network card to other hosts; the vendor's machines have one a device.
      config: GPUs: the device facts of a `GpuTargetConfigProto`, as text. TPUs: "".
    """

    name: str
    platform: str
    kind: str
    memory_bytes: int
    flops: float
    memory_rate: float
    link_rate: float
    card_rate: float = 0.0
    config: str = ""

    @property
    def room(self) -> int:
        """92 % of the memory; the rest is the runtime's, for itself and for collectives."""
        return int(0.92 * self.memory_bytes)


def _gpu(
    name: str,
    title: str,
    major: int,
    cores: int,
    memory: float,
    flops: float,
    rate: float,
    link: float,
    card: float,
) -> Accelerator:
    """A data-centre GPU; the other facts are the same from Ampere to Blackwell."""
    shared = {8: 167936, 9: 233472, 10: 233472}[major]
    config = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - 1024}
  core_count: {cores} fpus_per_core: {64 if major == 8 else 128} clock_rate_ghz: 1.9
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(rate)} device_memory_size: {int(memory)}
  l2_cache_size: {41943040 if major == 8 else 52428800}
  cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{title}"
"""
    return Accelerator(name, "gpu", title, int(memory), flops, rate, link, card, config)


def _tpu(
    name: str, kind: str, memory: float, flops: float, rate: float, link: float
) -> Accelerator:
    return Accelerator(name, "tpu", kind, int(memory), flops, rate, link)


# Peak rates are the vendors' (dense bfloat16); link rates are per device and direction. Network
# cards are those of DGX machines: 200 Gbit/s (A100), 400 Gbit/s. Memory of GPUs is what CUDA
# reports; A100-40G, H200 and B200 rounded.
ACCELERATORS = {
    one.name: one
    for one in (
        _gpu("a100-40g", "NVIDIA A100-SXM4-40GB", 8, 108, 42.3e9, 312e12, 1.555e12, 300e9, 25e9),
        _gpu("a100-80g", "NVIDIA A100-SXM4-80GB", 8, 108, 84.9e9, 312e12, 2.039e12, 300e9, 25e9),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 9, 132, 84942979072, 989e12, 3.35e12, 450e9, 50e9),
        _gpu("h200", "NVIDIA H200", 9, 132, 150.7e9, 989e12, 4.8e12, 450e9, 50e9),
        _gpu("b200", "NVIDIA B200", 10, 148, 191.5e9, 2250e12, 8e12, 900e9, 50e9),
        _tpu("v5e", "TPU v5 lite", 16 * 2**30, 197e12, 819e9, 200e9),
        _tpu("v5p", "TPU v5", 95 * 2**30, 459e12, 2765e9, 600e9),
        _tpu("v6e", "TPU v6 lite", 32 * 2**30, 918e12, 1640e9, 400e9),
    )
}


def accelerator_of(device: jax.Device) -> Accelerator | None:
    """The facts of a device that is there; None = a processor, or an accelerator not listed."""
    kinds = {one.kind: one for one in ACCELERATORS.values()}
    return kinds.get(device.device_kind)


@dataclasses.dataclass(frozen=True)
class Target:
    """Some accelerators in slices: parts of a cluster that a slow link joins.

    Attributes:
      accelerator: every device's facts.
      slices: number of slices; a region is one or a part of one.
      shape: GPUs: (hosts, devices of one) of a slice; TPUs: the chips' grid.
      host_rate: GPUs: bytes a second and direction from one host to the others of its slice; None =
        a network card a device (`Accelerator.card_rate`).
    """

    accelerator: Accelerator
    slices: int
    shape: tuple[int, ...]
    host_rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """A target by name.

        Args:
          text: `h100:2x8` (2 slices of 8 GPUs), `h100:2x4x8` (2 slices of 4 hosts of 8),
            `h100:2x4x8@50` (a host sends 50 GB/s to the others), `v5e:4x4` (16 chips) or
            `v5e:4x4x2slices`.

        Raises:
          ValueError: an unknown device, or a shape or rate that cannot be read or has no use.
        """
        whole, at, rate = text.partition("@")
        target = cls._parse(text, whole)
        if not at:
            return target
        if not target.is_gpu or target.shape[0] == 1:
            raise ValueError(
                f"target {text!r}: @ is the rate between hosts of a slice, and {whole} has no such "
                f"hosts: write {whole}"
            )
        if not re.fullmatch(r"\d+(\.\d+)?", rate) or not float(rate):
            raise ValueError(
                f"target {text!r}: {rate!r} is no rate of a host in GB/s: write {whole}@400"
            )
        return dataclasses.replace(target, host_rate=1e9 * float(rate))

    @classmethod
    def _parse(cls, text: str, whole: str) -> Target:
        name, _, shape = whole.partition(":")
        bare = re.fullmatch(r"(.*?)x(\d+)", name)  # h100x8
        if bare and bare[1] in ACCELERATORS and not shape:
            sample = f"1x{bare[2]}" if ACCELERATORS[bare[1]].platform == "gpu" else "4x4"
            raise ValueError(f"target {text!r}: write {bare[1]}:{sample}")
        if name not in ACCELERATORS:
            raise ValueError(
                f"target {text!r}: device {name!r} {is_unknown(name, ACCELERATORS, 'use one of')}"
            )
        one = ACCELERATORS[name]
        sample = "2x8" if one.platform == "gpu" else "4x4x2slices"
        if one.platform == "gpu" and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
            first, *rest = map(int, shape.split("x"))
            return cls(one, first, (1, *rest) if len(rest) == 1 else tuple(rest))
        grid = re.fullmatch(r"([1-9]\d*(?:x[1-9]\d*){1,2})(?:x([1-9]\d*)slices)?", shape)
        if one.platform == "tpu" and grid:
            return cls(one, int(grid[2] or 1), tuple(map(int, grid[1].split("x"))))
        raise ValueError(f"target {text!r}: write {name}:{sample}, with sizes of at least 1")

    def __str__(self) -> str:
        sizes = [n for i, n in enumerate(self.shape) if not (self.is_gpu and i == 0 and n == 1)]
        grid = "x".join(map(str, sizes))
        if self.is_gpu:
            rate = "" if self.host_rate is None else f"@{self.host_rate / 1e9:g}"
            return f"{self.accelerator.name}:{self.slices}x{grid}{rate}"
        return f"{self.accelerator.name}:{grid}" + (
            f"x{self.slices}slices" if self.slices > 1 else ""
        )

    @property
    def is_gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return self.accelerator.platform == "gpu"

    @property
    def devices_per_slice(self) -> int:
        """Number of devices in a slice."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Number of devices in all."""
        return self.slices * self.devices_per_slice

    def rate(self, groups: Sequence[Sequence[int]], in_ring: bool) -> float:
        """Bytes a second at which one device sends to others of its group, inside a slice.

        Between hosts a ring leaves a host once for each of its members there, by a card of each, so
        it is as many times faster than one card. NVLink bounds it. Other transfers leave by the
        device's own card.

        Args:
          groups: numbers of the devices that exchange with one another.
          in_ring: whether they pass parts on along a ring, as sums and gathers do.
        """
        link = self.accelerator.link_rate
        if not self.is_gpu:
            return link
        each = self.shape[-1]
        on_hosts = [collections.Counter(one // each for one in group) for group in groups]
        spread = [count for count in on_hosts if len(count) > 1]
        if not spread:
            return link
        whole = each * self.accelerator.card_rate if self.host_rate is None else self.host_rate
        cards = min(min(count.values()) for count in spread) if in_ring else 1
        return min(link, whole * cards / each)

    @functools.cached_property
    def devices(self) -> list[jax.Device]:
        """The devices, slice by slice: programs are compiled for them, nothing is put on them.

        Raises:
          RuntimeError: the compiler for them is not installed, or JAX does not offer it.
        """
        try:
            with _without_tpu():
                devices = list(self._topology().devices)
                if not self.is_gpu:
                    one = jax.ShapeDtypeStruct(
                        (), "int32", sharding=SingleDeviceSharding(devices[0])
                    )
                    jax.jit(lambda x: x).lower(one).compile()  # libtpu reads its settings only now
                return devices
        except Exception as error:  # JAX raises several types, each of another backend
            raise RuntimeError(
                f"target {self}: {_missing(self.accelerator.platform, error)}"
            ) from error

    def _topology(self):
        if self.is_gpu:
            hosts, each = self.shape
            return topologies.get_topology_desc(
                platform="cuda",
                topology_name=self.accelerator.name,
                target_config=self.accelerator.config,
                topology=f"{self.slices}x{hosts}x{each}",
            )
        grid = "x".join(map(str, self.shape))
        return topologies.get_topology_desc(
            f"{self.accelerator.name}:{grid}", platform="tpu", num_slices=self.slices
        )

    def mesh(
        self, region: int | None = None, stage: int = 1, fsdp: int | None = None, tensor: int = 1
    ) -> Mesh:
        """A mesh over all devices; `region` defaults to the slices, `fsdp` to the other devices.

        Raises:
          ValueError: the sizes do not use every device, or a region spans several slices.
        """
        region = self.slices if region is None else region
        inside = region * stage * tensor
        fsdp = max(1, self.size // inside) if fsdp is None else fsdp
        sizes = f"region={region} stage={stage} fsdp={fsdp} tensor={tensor}"
        if inside * fsdp != self.size:
            raise ValueError(
                f"target {self} has {self.size} devices, and the mesh {sizes} uses "
                f"{inside * fsdp}: make their product {self.size}"
            )
        if region % self.slices:
            raise ValueError(
                f"target {self} has {self.slices} slices: with {sizes} a region would span "
                f"several; make region a multiple of {self.slices}"
            )
        return make_mesh(region, stage, fsdp, tensor, devices=self.devices)


def _missing(platform: str, error: Exception) -> str:
    asked = os.environ.get("JAX_PLATFORMS", "")
    if platform == "gpu" and "cpu" not in asked and not _has_gpu():
        return "set JAX_PLATFORMS=cpu: without a driver JAX offers absent GPUs only then"
    packages = {
        "gpu": "jax-cuda12-plugin (of jax's version) and nvidia-cuda-nvcc-cu12",
        "tpu": "libtpu",
    }
    return (
        f"its compiler needs {packages[platform]}: pip install 'lowcomm_jax[aot]' "
        f"({type(error).__name__}: {str(error).splitlines()[0][:200]})"
    )


def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # no questions to the cloud, which take time where there is none
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several programs may compile at once
    "XLA_FLAGS": "",  # it ends the process at a flag of the CPU's; its own are in LIBTPU_INIT_ARGS
}


@contextlib.contextmanager
def _without_tpu() -> Iterator[None]:
    """Let libtpu start as a compiler alone."""
    before = {name: os.environ.get(name) for name in _TPU}
    os.environ.update(_TPU)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
