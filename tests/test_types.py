"""The gate of the type checker (`check_types.py`) sees faults; typical uses run as typed."""

import check_types
import pytest
import typed_uses
from test_public_names import offered_names

from lowcomm_jax import exchange


def _symbol(name: str, message: str = "") -> dict:
    return {"name": name, "isTypeKnown": not message, "diagnostics": [{"message": message}]}


def test_a_name_without_a_type_is_a_fault_and_an_internal_class_is_none():
    symbols = [
        _symbol("lowcomm_jax.a", 'Type annotation for parameter "x" is missing'),
        _symbol("lowcomm_jax.b", 'Return type is partially unknown\n  Return type is "SyncLoop"'),
        _symbol("lowcomm_jax.c", 'Type argument 1 for class "dict" has unknown type'),
        _symbol("lowcomm_jax.make_mesh", 'Type argument 1 for class "Sequence" has unknown type'),
        _symbol("lowcomm_jax.d"),
    ]
    assert [line.partition(":")[0] for line in check_types.faults_in_names(symbols)] == [
        "lowcomm_jax.a",
        "lowcomm_jax.c",
    ]


def test_public_are_the_names_where_they_are_offered_and_where_they_are_defined():
    names = {"lowcomm_jax.exchange.Timing": exchange.Timing}
    symbols = [
        _symbol("lowcomm_jax.exchange.Timing"),
        _symbol("lowcomm_jax.store.timing.Timing"),
        _symbol("lowcomm_jax.store.timing.Timing.violations"),
        _symbol("lowcomm_jax.store.timing.TimingElse"),
    ]
    assert check_types.public(symbols, names) == symbols[:3]
    with pytest.raises(SystemExit, match=r"exchange\.Timing is public"):
        check_types.public(symbols[3:], names)


def test_the_stub_of_exchange_names_what_the_room_offers():
    stub = exchange.__file__ + "i"
    with open(stub, encoding="utf-8") as lines:
        told = [line.split()[-1] for line in lines if line.startswith("from")]
    assert sorted(told) == sorted(exchange.__all__)
    for name in told:
        assert f"lowcomm_jax.exchange.{name}" in offered_names()


def test_typical_uses_run(tmp_path):
    typed_uses.rules()
    typed_uses.parts()
    typed_uses.a_run(tmp_path / "checkpoints")
