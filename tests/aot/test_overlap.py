"""Payloads cross regions while inner steps run: the loop stands between start and end."""

import jax
import pytest
from aot.aot_cases import BLOCKS, M, assert_beside, needs, small, transformer

from lowcomm_jax.compression import make
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.sync.compiler_options import inner_options

TARGETS = ("h100:2x4", "v5e:2x2x2slices")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("codec", ["int4", "two_shot"])
def test_coded_payloads_hide(codec, target):
    two_shot = codec == "two_shot"
    given = {"reduce": "two_shot"} if two_shot else {}
    made = make("int8" if two_shot else codec, stacked=BLOCKS, **given)
    method = M.streaming_diloco(8, 2, 2, 0.5, codec=made)
    assert_beside(small(needs(target), method, regions=2, fsdp=4))


@pytest.mark.parametrize("target", ["h100:2x8", "v5e:2x4x2slices"])
def test_a_transformer_of_150m_hides_it_with_fsdp_inside(target):
    report = transformer(
        needs(target),
        "diloco_150m",
        M.streaming_diloco(100, 3, 5, 0.5),
        batch=16,
        length=1024,
        mesh={"region": 2, "fsdp": 8},
        vocab_size=32000,
    )
    assert_beside(report)


def test_the_compiler_of_gpus_knows_the_options():
    """One that is renamed is refused, where it is set for a jitted function."""
    target = needs("h100:2x4")
    options = inner_options(Regions(2, target.mesh(region=2, fsdp=4)))
    assert len(options) >= 6
    where = jax.sharding.SingleDeviceSharding(target.devices[0])
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=where)
    jax.jit(lambda x: x + 1, compiler_options=options).lower(x).compile()
    for option, value in options.items():
        renamed = {option + "_renamed": value}
        with pytest.raises(Exception, match="No such"):
            jax.jit(lambda x: x + 1, compiler_options=renamed).lower(x).compile()
