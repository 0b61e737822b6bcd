"""What a factory of a method is given arrives in the parts of the method."""

import inspect

import pytest
from refused_lines import lines_of

from lowcomm_jax import batching, compression, methods
from lowcomm_jax.planner.methods import FACTORIES, asked_for


def parameters(factory):
    return inspect.signature(factory).parameters


def taking(setting):
    return sorted(name for name, factory in FACTORIES.items() if setting in parameters(factory))


def make(name, **settings):
    factory = FACTORIES[name]
    needed = {
        key: asked_for(2)[key]
        for key, parameter in parameters(factory).items()
        if parameter.default is inspect.Parameter.empty
    }
    return factory(**needed | settings)


@pytest.mark.parametrize("name", taking("codec"))
def test_a_method_sends_with_the_codec_it_is_given(name):
    wire = compression.make("int8")
    method = make(name, codec=wire)
    sent = [method.codec, *(channel.codec for channel in method.channels)]
    assert [codec for codec in sent if codec is not None] == [wire]


@pytest.mark.parametrize("name", taking("inner_batching"))
def test_a_method_keeps_the_batch_policy_it_is_given(name):
    policy = batching.Fixed(3)
    assert make(name, inner_batching=policy).inner_batching is policy


ANOTHER_KIND = ["x", 2.5, 4.0, None, [1, 2], [1.0, None], {"a": 1}]
TOLD_AS = {"experts": "roles"}
FINE = {
    "'x'": ("compare experts stacked"),
    "2.5": (
        "alpha beta clip confidence gamma global_learning_rate learning_rate most outlier "
        "rate removal step_seconds taylor temperature threshold turn until weight"
    ),
    "4.0": (
        "beta bits clip confidence global_learning_rate learning_rate most outlier rate "
        "removal step_seconds taylor temperature threshold turn until weight"
    ),
    "None": (
        "adaptive buffer codec first fragments gamma global_codec inner_batching mean merge "
        "merge_every outer period rank second speeds step_seconds sync_seconds "
        "syncs_per_period"
    ),
    "[1, 2]": ("overlap period speeds travel"),
}
"""Keywords of which a value of `ANOTHER_KIND`, by its `repr`, is one that a method takes."""


@pytest.mark.parametrize("name", FACTORIES)
def test_a_value_of_another_kind_gets_a_line_and_hides_no_other(name):
    takes = parameters(FACTORIES[name])
    for key in takes:
        also = {"codec": "int9"} if "codec" in takes and key != "codec" else {}
        told = lines_of(make(name, **also), 2)
        assert len(told) == len(also), told
        for value in ANOTHER_KIND:
            lines = lines_of(make(name, **also, **{key: value}), 2)
            new = [line for line in lines if line not in told]
            assert len(new) == len(lines) - len(told), (key, value, lines)
            named = [line for line in new if TOLD_AS.get(key, key) in line]
            fine = not new and key in FINE.get(repr(value), "").split()
            assert named or fine, (key, value, lines)


def test_dilocox_counts_whole_steps_of_travel():
    """2.1 / 0.3 is a little above 7 in floating point, and 7 steps are enough."""
    timing = {"step_seconds": 0.3, "sync_seconds": 2.1}
    assert set(methods.dilocox(7, **timing).schedule.travel) == {7}
    assert methods.dilocox(7, adaptive=False, **timing).schedule.travel == (7,)
    longer = timing | {"sync_seconds": 2.11}
    assert methods.dilocox(8, adaptive=False, **longer).schedule.travel == (8,)


def test_dilocox_shortens_rounds_to_an_eighth():
    assert methods.dilocox(80).schedule.shortest == 10
    assert methods.dilocox(5).schedule.shortest == 1
