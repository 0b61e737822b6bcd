"""Kernels of a trace: what they do, how long they take, and what runs beside them."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from experiments.bench import traces
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
    return traces.kernels_of(gpu_profile(STREAMS))


def test_kernels_of_a_gpu_are_told_by_instruction_and_by_name(seen):
    # The program says what the library's product is, whatever its kernel is called.
    by_kind = traces.by_kind(seen, {"custom_call_7": "product", "loop_add_fusion_3": "other"})
    took = {kind: [round(k.seconds * 1e6) for k in some] for kind, some in by_kind.items()}
    assert took == {"product": [40], "attention": [20], "other": [10], "exchange": [40]}
    assert traces.by_kind(seen, {}).keys() == took.keys()
    for kind, some in traces.by_kind(seen, {}).items():  # by their names alone
        assert [round(k.seconds * 1e6) for k in some] == took[kind]


def test_an_exchange_beside_work_counts_as_long_as_both_run(seen):
    by_kind = traces.by_kind(seen, {})
    moving = by_kind.pop("exchange")
    work = [one for some in by_kind.values() for one in some]
    assert traces.busy_seconds(work) == pytest.approx(70e-6)
    assert traces.busy_seconds([*work, *moving]) == pytest.approx(90e-6)
    assert traces.beside_seconds(moving, work) == pytest.approx(20e-6)


def test_what_takes_longest_is_named(seen):
    assert list(traces.longest(seen, 2)) == ["while.2", "custom-call.7"]


def test_a_trace_here_has_the_operations_of_the_program():
    x = jnp.ones((64, 64))
    compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
    jax.block_until_ready(compiled(x))
    by_kind = traces.by_kind(
        traces.traced(lambda: compiled(x)), traces.kinds(parse(compiled.as_text()))
    )
    assert by_kind["product"] and not by_kind["attention"] and not by_kind["exchange"]
