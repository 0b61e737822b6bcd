"""What fields of records say of themselves, and what follows from that."""

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.adloco.setup import AdaptiveSetup
from lowcomm_jax.data import DataConfig
from lowcomm_jax.models import TransformerConfig
from lowcomm_jax.optimizers import InnerConfig
from lowcomm_jax.settings import (
    FROM_1,
    InConfig,
    config_fields,
    described,
    misfits,
    number,
    settings_of,
)

SIZES = ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width")
SHARE = number(lambda x: 0 <= x <= 1, "must lie in [0, 1]")


@described
@dataclasses.dataclass(frozen=True)
class Tank:
    """Holds water.

    Raises:
      Overflow: it is full.
    """

    litres: Annotated[int, FROM_1, "what it holds."]
    level: Annotated[float, InConfig("learnt", section="tank"), SHARE, "how full it is."] = 0.5
    shape: Annotated[Literal["round", "square"], InConfig("place"), "its ground."] = "round"
    note: Annotated[str | None, "anything."] = None


def test_a_field_says_its_meaning_its_default_its_type_and_its_place_in_a_config():
    found = settings_of(Tank)
    assert [setting.about for setting in found.values()] == [
        "what it holds.",
        "how full it is.",
        "its ground.",
        "anything.",
    ]
    assert found["litres"].default is dataclasses.MISSING and found["level"].default == 0.5
    assert found["level"].kind is float and found["note"].takes is None
    assert config_fields(Tank) == {"level": "tank.level", "shape": "shape"}


def test_the_docstring_has_every_field():
    fields = [f"{name}: {setting.about}" for name, setting in settings_of(Tank).items()]
    listed = "".join(f"\n      {line}" for line in fields)
    raises = "\n\n    Raises:\n      Overflow: it is full.\n    "
    assert Tank.__doc__ == f"Holds water.\n\n    Attributes:{listed}{raises}"


def test_values_that_a_field_does_not_take():
    wrong = Tank(litres=0, level=2.0, shape="oval", note=3)
    assert [problem.text for problem in misfits(wrong)] == [
        "litres=0: give a whole number of at least 1",
        "level=2.0: must lie in [0, 1]",
        "shape='oval': choose one of round, square",
    ]
    assert [problem.about for problem in misfits(wrong, ["level"])] == ["litres", "shape"]
    assert not misfits(Tank(1)) and not misfits(Tank(1, 1))


@pytest.mark.parametrize("value", ["0.5", None, True, float("nan"), [0.5]])
def test_what_is_no_number_is_none(value):
    assert [problem.about for problem in misfits(Tank(1, value))] == ["level"]


@pytest.mark.parametrize("record", [InnerConfig, DataConfig, TransformerConfig, AdaptiveSetup])
def test_every_field_of_a_record_is_described(record):
    assert all(setting.about for setting in settings_of(record).values())


@pytest.mark.parametrize("record", [InnerConfig, DataConfig, TransformerConfig])
def test_every_default_is_a_value_that_its_field_takes(record):
    needed = dict.fromkeys(SIZES, 2) if record is TransformerConfig else {}
    assert misfits(record(**needed)) == []
    assert "\n    Attributes:\n      " in record.__doc__
    for name in settings_of(record):
        assert f"\n      {name}: " in record.__doc__


@pytest.mark.parametrize(
    "field, value, fix",
    [
        ("optimizer", "adam", "choose one of adamw, adopt, muon, sgd; did you mean adamw?"),
        ("schedule", "linear", "choose one of cosine, wsd, constant"),
        ("learning_rate", -1.0, "give a positive, finite number"),
        ("eps", float("inf"), "give a positive, finite number"),
        ("b2", 1.0, "must lie in [0, 1)"),
        ("final_fraction", 2.0, "must lie in [0, 1]"),
        ("weight_decay", -0.1, "give 0 (off) or a positive number"),
        ("clip_norm", 0.0, "give a positive norm, or None (off)"),
        ("muon_steps", 0, "give a whole number of at least 1"),
    ],
)
def test_values_of_an_inner_optimizer(field, value, fix):
    assert InnerConfig(**{field: value}).violations(1000) == [f"{field}={value!r}: {fix}"]


def test_numbers_of_numpy_pass_and_arrays_are_refused_for_what_they_are():
    given = {"learning_rate": np.float32(0.1), "muon_steps": np.int64(3)}
    assert InnerConfig(**given).violations(1000) == []
    fix = "an array; give its number, value.item()"
    for field, value in {"learning_rate": jnp.float32(0.1), "muon_steps": np.array(3)}.items():
        assert InnerConfig(**{field: value}).violations(1000) == [f"{field}={value!r}: {fix}"]
    assert InnerConfig(b1=np.float64(1)).violations(1000) == [
        "b1=np.float64(1.0): must lie in [0, 1)"
    ]


def test_an_inner_optimizer_without_clipping_and_with_any_norm():
    for norm in (None, float("inf"), 1):
        assert InnerConfig(clip_norm=norm).violations(1000) == []
