"""Kernels of a trace: what they do, how long they take, and what runs beside them."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from experiments.bench import kernels
from lowcomm_jax.aot.hlo import parse

# As a GPU's: streams hold kernels, other lines sum them up; microseconds.
STREAMS = {
    "Stream #14(Compute)": [
        ("nvjet_hsh_128x256", 0, 40, "custom-call.7"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 40, 20, ""),
        ("loop_add_fusion_3", 60, 10, "loop_add_fusion.3"),
        ("while.2", 0, 70, "while.2"),
    ],
    "Stream #20(Compute)": [("ncclDevKernel_AllGather_RING_LL", 50, 40, "all-gather-start.1")],
    "XLA Modules": [("jit_block(1)", 0, 90, "")],
}


def gpu_profile(streams):
    names = sorted({e[0] for events in streams.values() for e in events})
    texts = []
    for number, (line, events) in enumerate(streams.items(), 1):
        body = "".join(
            f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {start * 10**6} "
            f'duration_ps: {took * 10**6} stats {{ metadata_id: 1 str_value: "{operation}" }} }} '
            for name, start, took, operation in events
        )
        texts.append(f'lines {{ id: {number} name: "{line}" timestamp_ns: 1000 {body} }} ')
    known = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }} '
        for i, name in enumerate(names, 1)
    )
    stats = 'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }'
    text = f'planes {{ id: 1 name: "/device:GPU:0" {"".join(texts)} {known} {stats} }}'
    return ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))


@pytest.fixture(scope="module")
def seen():
    return kernels.kernels_of(gpu_profile(STREAMS))


def test_kernels_of_a_gpu_are_told_by_instruction_and_by_name(seen):
    # The program says what the library's product is, whatever its kernel is called.
    by_kind = kernels.by_kind(seen, {"custom_call_7": "products", "loop_add_fusion_3": "others"})
    took = {kind: [round(k.seconds * 1e6) for k in some] for kind, some in by_kind.items()}
    assert took == {"products": [40], "attention": [20], "others": [10], "exchange": [40]}
    assert kernels.by_kind(seen, {}).keys() == took.keys()
    for kind, some in kernels.by_kind(seen, {}).items():  # by their names alone
        assert [round(k.seconds * 1e6) for k in some] == took[kind]


def test_an_exchange_beside_work_counts_as_long_as_both_run(seen):
    by_kind = kernels.by_kind(seen, {})
    moving = by_kind.pop("exchange")
    work = [kernel for some in by_kind.values() for kernel in some]
    assert kernels.busy_seconds(work) == pytest.approx(70e-6)
    assert kernels.busy_seconds([*work, *moving]) == pytest.approx(90e-6)
    assert kernels.beside_seconds(moving, work) == pytest.approx(20e-6)


def test_what_takes_longest_is_named(seen):
    assert list(kernels.longest(seen, 2)) == ["while.2", "custom-call.7"]


def test_traffic_counts_each_operand_and_result_once_and_no_product():
    x = jnp.ones((64, 32))

    def program(fn, *args):
        return parse(jax.jit(fn).lower(*args).compile().as_text())

    assert kernels.traffic(program(lambda x, y: jnp.tanh(x) + y, x, x)) == (3 * x.nbytes, 1)
    assert kernels.traffic(program(lambda x, y: x.T @ y, x, x)) == (0, 0)
    # Of a stack, a row is read.
    moved, _ = kernels.traffic(program(lambda s, i: jnp.tanh(s[i]), jnp.ones((8, 64)), 3))
    assert 2 * 4 * 64 <= moved < 4 * 4 * 64


def test_a_trace_here_has_the_operations_of_the_program():
    x = jnp.ones((64, 64))
    compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
    jax.block_until_ready(compiled(x))
    by_kind = kernels.by_kind(
        kernels.traced(lambda: compiled(x)), kernels.kinds(parse(compiled.as_text()))
    )
    assert by_kind["products"] and not by_kind["attention"] and not by_kind["exchange"]
