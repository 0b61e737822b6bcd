"""When a device waits, what its kernels move, and at which rates: on programs written by hand.

The device: 1,000 operations and 100 bytes a second at what kernels reach of its peaks.
"""

import dataclasses

import pytest
from aot.aot_cases import M, needs, small

from lowcomm_jax.aot import ACCELERATORS, Target
from lowcomm_jax.aot.arithmetic import matrix_flops
from lowcomm_jax.aot.hlo import parse
from lowcomm_jax.aot.kernels import OTHERS_REACH, PRODUCTS_REACH
from lowcomm_jax.aot.timeline import play

DEVICE = dataclasses.replace(
    ACCELERATORS["h100"], flops=1000 / PRODUCTS_REACH, memory_rate=100 / OTHERS_REACH
)
# 10 x 10 values: a product takes 2 s, a copy 8 s (it reads and writes 400 bytes each).
FUSED = """
%product (a: f32[10,10], b: f32[10,10]) -> f32[10,10] {
  %a = f32[10,10]{1,0} parameter(0)
  %b = f32[10,10]{1,0} parameter(1)
  ROOT %dot.0 = f32[10,10]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%row (x: f32[10,10], i: s32[]) -> f32[1,10] {
  %x = f32[10,10]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice.0 = f32[1,10]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,10}
}

%put (x: f32[10,10], r: f32[1,10], i: s32[]) -> f32[10,10] {
  %x = f32[10,10]{1,0} parameter(0)
  %r = f32[1,10]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %update.0 = f32[10,10]{1,0} dynamic-update-slice(%x, %r, %i, %i)
}
"""


def program(lines, more=""):
    """A program over `x`, `y`: f32[10,10], and `i`: s32[]."""
    return parse(f"""HloModule m
{FUSED}{more}
ENTRY %main (x: f32[10,10], y: f32[10,10], i: s32[]) -> f32[10,10] {{
  %x = f32[10,10]{{1,0}} parameter(0)
  %y = f32[10,10]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
{lines}
  ROOT %end = f32[10,10]{{1,0}} bitcast(%x)
}}
""")


def product(name, given="%x"):
    return f"  %{name} = f32[10,10]{{1,0}} fusion({given}, %y), kind=kOutput, calls=%product"


def gather(name, attributes="replica_groups={{0,1}}"):
    return (
        f"  %{name} = (f32[5,10]{{1,0}}, f32[10,10]{{1,0}}) all-gather-start(%x), {attributes}",
        f"  %{name}-done = f32[10,10]{{1,0}} all-gather-done(%{name})",
    )


def played(lines, seconds, more=""):
    transfers = {("main", name): time for name, time in seconds.items()}
    found = play(program("\n".join(lines), more), transfers, DEVICE)
    waited = {name: found.waited["main", name] for name in seconds}
    return waited, {name: found.beside["main", name] for name in seconds}, found.work


@pytest.mark.parametrize("seconds, waits", [(1.5, 0), (2, 0), (5, 3)])
def test_a_collective_is_waited_for_as_long_as_it_outlasts_the_kernels_beside_it(seconds, waits):
    start, end = gather("g")
    waited, beside, work = played([start, product("p"), end], {"g": seconds})
    assert (waited, beside) == ({"g": waits}, {"g": 2})
    assert (work["product"].flops, work["product"].seconds) == (2000, 2)


def test_the_link_moves_one_collective_after_another():
    (one, one_end), (two, two_end) = gather("g"), gather("h")
    waited, _, _ = played([one, two, product("p"), one_end, two_end], {"g": 3, "h": 4})
    assert waited == {"g": 1, "h": 4}
    waited, _, _ = played([one, two, product("p"), two_end, one_end], {"g": 3, "h": 4})
    assert waited == {"h": 5, "g": 0}


def test_a_collective_without_a_start_of_its_own_is_waited_for_at_once():
    alone = "  %g = f32[10,10]{1,0} all-reduce(%x), replica_groups={{0,1}}"
    waited, beside, work = played([alone, product("p")], {"g": 3})
    assert (waited, beside) == ({"g": 3}, {"g": 0})
    assert work["other"].launches == 0
    start, end = gather("g", 'replica_groups={{0,1}}, backend_config={"is_sync":true}')
    waited, beside, _ = played([start, product("p"), end], {"g": 3})
    assert (waited, beside) == ({"g": 3}, {"g": 0})


def test_what_moves_over_another_network_is_not_waited_for():
    start, end = gather("g")
    waited, beside, _ = played([start, product("p"), end], {"g": None})
    assert (waited, beside) == ({"g": 0}, {"g": 2})


LOOP = """
%condition (s: (f32[10,10], f32[10,10])) -> pred[] {
  %s = (f32[10,10]{1,0}, f32[10,10]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%body (s: (f32[10,10], f32[10,10])) -> (f32[10,10], f32[10,10]) {
  %s = (f32[10,10]{1,0}, f32[10,10]{1,0}) parameter(0)
  %x = f32[10,10]{1,0} get-tuple-element(%s), index=0
  %y = f32[10,10]{1,0} get-tuple-element(%s), index=1
START
PRODUCT
END
  ROOT %t = (f32[10,10]{1,0}, f32[10,10]{1,0}) tuple(%x, %y)
}
"""


def test_rounds_of_a_loop_count_as_often_as_they_run():
    """The first waits for what was started before the loop, too; 1,000 others are alike."""
    inner, inner_end = gather("g")
    outer, outer_end = gather("h")
    more = LOOP.replace("START", inner).replace("PRODUCT", product("p")).replace("END", inner_end)
    loop = (
        "  %l = (f32[10,10]{1,0}, f32[10,10]{1,0}) while(%t), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"1001"}}'
    )
    pair = "  %t = (f32[10,10]{1,0}, f32[10,10]{1,0}) tuple(%x, %y)"
    transfers = {("body", "g"): 3.0, ("main", "h"): 7.0}
    lines = "\n".join([pair, outer, loop, outer_end])
    found = play(program(lines, more), transfers, DEVICE)
    assert found.waited["body", "g"] == pytest.approx((7 + 3 - 2) + 1000 * (3 - 2))
    assert found.waited["main", "h"] == 0
    assert found.beside["main", "h"] == pytest.approx(1001 * 2)
    assert found.work["product"].launches == 1001
    assert found.work["product"].flops == matrix_flops(program(lines, more)) == 1001 * 2000


BRANCHES = """
%sum (x: f32[10,10]) -> f32[10,10] {
  %x = f32[10,10]{1,0} parameter(0)
  ROOT %g = f32[10,10]{1,0} all-reduce(%x), replica_groups={{0,1}}, channel_id=1
}

%keep (x: f32[10,10]) -> f32[10,10] {
  %x = f32[10,10]{1,0} parameter(0)
  ROOT %k = f32[10,10]{1,0} copy(%x)
}
"""


def test_of_a_conditional_the_branch_is_played_that_moves_most():
    lines = (
        "  %c = f32[10,10]{1,0} conditional(%i, %x, %x), branch_computations={%keep, %sum}\n"
        "  %d = f32[10,10]{1,0} call(%x), to_apply=%keep"
    )
    found = play(program(lines, BRANCHES), {("sum", "g"): 3.0}, DEVICE)
    assert found.waited["sum", "g"] == 3
    assert (found.work["other"].launches, found.work["other"].seconds) == (1, 8)


@pytest.mark.parametrize(
    "line, nbytes",
    [
        ("%k = f32[10,10]{1,0} copy(%x)", 800),
        ("%k = f32[1,10]{1,0} fusion(%x, %i), kind=kLoop, calls=%row", 40 + 4 + 40),
        ("%k = f32[10,10]{1,0} fusion(%x, %r, %i), kind=kLoop, calls=%put", 40 + 4 + 40),
        ("%k = f32[10,10]{1,0:T(8,128)S(1)} copy(%x)", 400),  # written on the chip
        ("%k = f32[10,10]{1,0} bitcast(%x)", None),
        ("%k = f32[10,10]{1,0} all-reduce(%x), replica_groups={{0}}", None),  # moves nothing
    ],
)
def test_kernels_move_what_they_read_and_write(line, nbytes):
    row = "  %r = f32[1,10]{1,0} bitcast(%x)"
    _, _, work = played([row, f"  {line}"], {})
    assert (work["other"].nbytes, work["other"].launches) == (nbytes or 0, int(nbytes is not None))
    assert work["other"].seconds == pytest.approx((nbytes or 0) / 100)


def test_products_and_attention_are_told_from_other_kernels():
    attention = (
        "  %a = (bf16[1,4,2,8]{3,2,1,0}, u8[64]{0}) custom-call(%q, %q, %q), "
        'custom_call_target="__cudnn$fmhaSoftmax"'
    )
    query = "  %q = bf16[1,4,2,8]{3,2,1,0} bitcast(%x)"
    _, _, work = played([query, attention, product("p")], {})
    assert work["attention"].flops == 2 * 2 * (4 * 2 * 8) * 4 / 2
    assert work["attention"].nbytes == 4 * (64 * 2)  # not the library's own memory
    assert work["product"].nbytes == 3 * 400
    assert work["other"].launches == 0


def test_a_compiled_program_is_played_whole():
    """Of a small model on four H100s."""
    report = small(needs("h100:1x4"), M.local_sgd(8), regions=1, fsdp=4)
    step = report.programs[0]
    # Three products of two layers and the head, forward and backward; the batch is cut in four.
    assert step.flops == 3 * 2 * (16 / 4) * 128 * (2 * 256 + 256)
    assert step.work["other"].launches > 0 < step.work["other"].nbytes
    assert all(one.waited + one.beside > 0 for one in step.collectives)
    assert 0 < step.exposed == sum(row["waited"] for row in step.inside.values())
    kernels = sum(work.seconds for work in step.work.values())
    assert step.seconds == pytest.approx(kernels + step.exposed)
    assert set(step.inside) == {"fsdp"} and step.inside["fsdp"]["rate"] == 450e9


@pytest.mark.parametrize(
    "text, group, in_ring, rate",
    [
        ("h100:2x8", range(8), True, 450),  # NVLink
        ("h100:1x8x8", range(64), True, 400),  # eight cards of a host, one ring each
        ("h100:1x8x8", range(64), False, 50),  # its own card
        ("h100:1x8x8", range(0, 64, 8), True, 50),  # eight groups share the cards
        ("h100:1x8x8@50", range(64), True, 50),  # one card a host
        ("h100:1x8x8@50", range(0, 64, 8), True, 6.25),
        ("h100:1x8x8@50", range(8), True, 450),
        ("a100-40g:2x10x8", range(16), True, 200),
        ("h100:1x2x8@4000", range(16), True, 450),
        ("v5e:4x4", range(16), True, 200),  # ICI
    ],
)
def test_a_link_has_the_rate_of_its_slowest_part(text, group, in_ring, rate):
    target = Target.parse(text)
    assert target.rate([list(group)], in_ring) == pytest.approx(rate * 1e9)
    assert str(target) == text
