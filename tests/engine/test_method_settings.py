"""What a factory of a method is given arrives in the parts of the method."""

import inspect

import pytest

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
    return factory(**needed, **settings)


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


def test_adloco_hands_every_setting_to_its_batch_test():
    shared = {
        "theta": 0.4,
        "nu": 2.5,
        "microbatches": 6,
        "smoothing": 0.25,
        "growth": 1.5,
        "monotone": False,
    }
    method = methods.adloco(4, start_batch=3, max_batch=48, **shared)
    assert method.inner_batching == batching.AugmentedTest(start=3, cap=48, **shared)
    norm = methods.adloco(4, test="norm", eta=0.3).inner_batching
    assert norm == batching.NormTest(start=1, cap=64, eta=0.3)


@pytest.mark.parametrize(
    "name, policy",
    [
        ("fixed", batching.Fixed),
        ("norm", batching.NormTest),
        ("inner_product", batching.InnerProductTest),
        ("augmented", batching.AugmentedTest),
    ],
)
def test_adloco_names_its_batch_tests(name, policy):
    assert type(methods.adloco(4, test=name).inner_batching) is policy


def test_dilocox_counts_whole_steps_of_travel():
    """2.1 / 0.3 is a little above 7 in floating point, and 7 steps are enough."""
    timing = {"step_seconds": 0.3, "sync_seconds": 2.1}
    assert set(methods.dilocox(7, **timing).schedule.travel) == {7}
    assert methods.dilocox(7, adaptive=False, **timing).schedule.travel == 7
    longer = timing | {"sync_seconds": 2.11}
    assert methods.dilocox(8, adaptive=False, **longer).schedule.travel == 8


def test_dilocox_shortens_rounds_to_an_eighth():
    assert methods.dilocox(80).schedule.shortest == 10
    assert methods.dilocox(5).schedule.shortest == 1
