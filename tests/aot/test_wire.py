"""What crosses regions in the compiled programs is what the ledger announces, for every method.

Of methods with a delay it crosses while inner steps run.
"""

import pytest
from aot.aot_cases import (
    DELAYED,
    METHODS,
    M,
    assert_beside,
    needs,
    of_method,
    small,
    small_announced,
)

TILES = 8192  # bytes a device at most by which a TPU's compiler pads what it gathers to tiles


@pytest.mark.parametrize("name", sorted(METHODS))
def test_gpu_programs_move_what_the_ledger_announces(name):
    report = of_method("h100:2x4", name)
    assert report.announced > 0
    # Devices share the norms of tensors, too: fewer values are filled up than there are devices.
    filled = 4 * (report.devices_per_region - 1) if METHODS[name]().reads == "norms" else 0
    assert 0 <= report.crossing_bytes - report.announced <= filled
    assert report.control_bytes <= 1024
    if name in DELAYED:
        assert_beside(report)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_tpu_slices_move_what_the_ledger_announces(name):
    report = of_method("v5e:2x2x2slices", name)
    padding = report.crossing_bytes - report.announced
    assert 0 <= padding <= TILES * report.devices_per_region
    assert report.control_bytes <= 1024
    if name in DELAYED:
        assert_beside(report)


@pytest.mark.parametrize("regions", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_noloco_synchronises_by_permutes_alone(regions):
    if regions == 2:
        report = of_method("h100:2x4", "noloco")
    else:
        report = small(needs("h100:8x2"), M.noloco(8), regions, fsdp=2)
    crossing = [one for each in report.programs for one in each.collectives if one.crosses]
    assert {one.kind for one in crossing} == {"collective-permute"}
    assert all(one.axes == ("region",) for one in crossing)


@pytest.mark.parametrize("codec", ["int8", "e3m0", "topk", "low_rank", "sign", "random_k"])
def test_codecs_move_what_the_ledger_announces(codec):
    from lowcomm_jax.compression import make

    method = M.diloco(8, codec=make(codec, stacked=("blocks",)))
    report = small(needs("h100:2x4"), method, regions=2, fsdp=4)
    # A device's share may be a single value, which is counted with control values.
    single = report.control_bytes * report.devices_per_region
    padding = report.crossing_bytes + single - report.announced
    # Fewer values than a region has devices, for each dtype and layout of the payload.
    assert 0 <= padding <= 64 * report.devices_per_region
    assert report.control_bytes <= 1024


def test_norms_travel_beside_what_is_reduced():
    report = small(needs("h100:4x2"), M.edit(8), regions=4, fsdp=2)
    # To three others each, one of two devices fills up one value.
    assert 0 <= report.crossing_bytes - report.announced <= 3 * 4
    assert report.control_bytes <= 1024
    (norms,) = [
        one
        for program in report.programs
        for one in program.collectives
        if one.crosses and one.kind == "all-gather" and one.arrays[0].shape[0] == 1
    ]
    dense = small_announced(needs("h100:4x2"), M.diloco(8), regions=4, fsdp=2)
    assert report.announced - dense == 3 * 4 * 5
    assert norms.total * 2 == 3 * 4 * 6, "five norms, filled up to three a device"
