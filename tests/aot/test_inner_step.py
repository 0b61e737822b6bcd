"""The inner step of a 150M model: the batch stays cut, and nothing is computed twice."""

import pytest
from aot.aot_cases import M, needs, of_150m, transformer

from lowcomm_jax.models import build, preset

SEQUENCES, LENGTH = 64, 1024
TOKENS = SEQUENCES * LENGTH
LARGEST_WEIGHT = 32_000 * 896


def moved_over_fsdp(program):
    """Arrays of the batch that a collective moves over `fsdp`: one dimension counts its tokens.

    All but rows of the embedding table that move instead of the table, gradients of rows, and the
    tokens' numbers that say which.
    """
    counts = {SEQUENCES, TOKENS} | {n // d for n in (SEQUENCES, TOKENS) for d in (2, 4, 8)}
    counts -= {1024, 896, 3584, 8, 16, 32}  # which are sizes of weights, too
    return [
        f"{one.kind} {array} ({one.op_name})"
        for one in program.collectives
        if "fsdp" in one.axes and one.kind != "all-to-all"
        for array in one.arrays
        if array.size > 4096 and array.dtype != "s32" and counts & set(array.shape)
    ]


@pytest.fixture(scope="module", params=["xla", "auto"])
def on_h100(request):
    return of_150m("h100:2x8", SEQUENCES, request.param)


def test_no_activation_crosses_fsdp(on_h100):
    assert moved_over_fsdp(on_h100.programs[0]) == []


@pytest.mark.parametrize("sequences, ways", [(64, 1), (16, 2)])
def test_rows_of_the_table_move_where_they_are_few(sequences, ways):
    """A device of 8 sequences has more tokens than a quarter of the table's rows, one of 2 fewer.

    Gradients of rows move in either case.
    """
    report = of_150m("h100:2x8", sequences, "auto")
    rows = [one for one in report.programs[0].collectives if one.kind == "all-to-all"]
    # Each way a device's rows in bfloat16, but for its own columns.
    assert sum(one.total for one in rows) == ways * (sequences * LENGTH / 8) * 896 * 2 * 7 / 8


def test_temporaries_of_the_inner_step_stay_small(on_h100):
    assert on_h100.programs[0].memory["temporaries"] <= 2.7e9


def test_a_device_does_its_share_of_the_arithmetic(on_h100):
    one = of_150m("h100:1x1", SEQUENCES // 8, "xla")
    # The kernel skips what is masked: 7 % less.
    assert on_h100.programs[0].flops == pytest.approx(one.programs[0].flops, rel=0.08)


def test_weights_are_gathered_and_gradients_scattered(on_h100):
    program = on_h100.programs[0]
    kinds = {one.kind for one in program.collectives if one.nbytes > 1e5}
    assert kinds == {"all-gather", "all-to-all", "reduce-scatter"}
    assert program.needs < on_h100.room and on_h100.fits


def test_arithmetic_is_the_formula_of_the_model():
    """Forward, backward and the block's recomputation, but for the last product of each block."""
    report = of_150m("h100:2x8", SEQUENCES, "auto")
    used = build(preset("diloco_150m")).flops_per_token(LENGTH) * TOKENS / 8
    again = 2 * 12 * (4 * 896 * 1024 + 896 * 3584 + 1024 * LENGTH) * TOKENS / 8
    # The kernel's backward pass computes the scores once more.
    kernel = 12 * 1024 * LENGTH * TOKENS / 8
    assert report.programs[0].flops == pytest.approx(used + again + kernel, rel=0.02)


@pytest.mark.slow
def test_tpu_slices_too():
    report = transformer(needs("v5e:2x4x2slices"), "diloco_150m", M.diloco(500), SEQUENCES, LENGTH)
    assert moved_over_fsdp(report.programs[0]) == []
    assert report.programs[0].memory["temporaries"] <= 2.7e9


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"fsdp": 1, "tensor": 8}])
def test_with_tensor_parallelism_too(mesh):
    report = transformer(needs("h100:2x8"), "diloco_150m", M.diloco(500), 64, 1024, mesh)
    assert moved_over_fsdp(report.programs[0]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, sequences, length, remat, flops, nbytes",
    [
        ("diloco_150m", 64, 1024, "none", 65.5e12, 80e9),
        ("scaling_1_3b", 16, 2048, "light", 275e12, 225e9),
    ],
)
def test_a_step_on_one_card_computes_and_moves_little_beside_what_is_useful(
    name, sequences, length, remat, flops, nbytes
):
    target = needs("h100:1x1")
    report = transformer(target, name, M.diloco(500), sequences, length, remat=remat)
    step, other = report.programs[0], report.programs[0].work["other"]
    useful = build(preset(name)).flops_per_token(length) * sequences * length
    assert useful < step.flops <= flops
    assert 0 < other.nbytes <= nbytes
    assert name != "diloco_150m" or other.launches <= 300


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "target, name, sequences, length",
    [
        ("h100:2x8", "diloco_150m", 64, 1024),
        ("h100:1x8x8", "diloco_150m", 1024, 1024),  # one region over eight hosts
        pytest.param("h100:2x8", "scaling_1_3b", 128, 2048, marks=pytest.mark.slow),
        pytest.param("h100:1x8x8", "scaling_1_3b", 1024, 2048, marks=pytest.mark.slow),
    ],
)
def test_with_fsdp_a_device_waits_for_one_hundredth_of_the_step(target, name, sequences, length):
    report = transformer(needs(target), name, M.diloco(500), sequences, length, remat="light")
    assert 0 < report.programs[0].exposed <= 0.01 * report.programs[0].seconds
