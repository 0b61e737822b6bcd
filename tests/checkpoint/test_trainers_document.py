"""What a checkpoint's document tells of trainers: checked as a whole before it is used."""

import copy
import re

import oracle
import pytest
from adloco.adaptive_cases import PERIOD, engine

import lowcomm_jax as lc
from lowcomm_jax.checkpoint import Checkpoints, DamagedError, store
from lowcomm_jax.rules.batching import NormTest

MEASURED = [(1.0, 3.0, 0.5, 1.0), (2.0, 4.0, 1.0, 0.0)]


def made(count=2):
    policy = NormTest(start=2, cap=8, microbatches=2)
    return engine(lc.methods.adloco(PERIOD, count, inner_batching=policy))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, engine) of a checkpoint within a round, without the method's description."""
    folder, one = tmp_path_factory.mktemp("saved"), made()
    with Checkpoints(folder) as checkpoints:
        state = one.init(oracle.make_params())
        state = state.with_trainer(0, state.first.replace(measured=MEASURED))
        checkpoints.save(state, extra={}, config={})
    return folder, one


def restored(saved, monkeypatch, change, one=None):
    """What is restored where the document is another, whose digest is right."""
    read = store.read_document

    def changed(path):
        document = copy.deepcopy(read(path))
        change(document)
        return document

    monkeypatch.setattr(store, "read_document", changed)
    folder, own = saved
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(one or own, oracle.make_params(), step=0).state


def measuring(*regions):
    """Puts these in the place of numbers that trainer 0 has measured."""
    return lambda d: d["trainers"]["live"]["0"].update(measured=regions)


def test_what_was_saved_comes_back(saved, monkeypatch):
    state = restored(saved, monkeypatch, lambda document: None)
    assert [trainer.measured for trainer in state.trainers.values()] == [MEASURED, None]


@pytest.mark.parametrize(
    "change, told",
    [
        (measuring("x"), "trainers: "),
        (measuring(1.0, 1.0), "trainers: "),
        (measuring(MEASURED[0], (1.0, "x", 1.0, 1.0)), "$.live[...].measured[1][1]"),
        (measuring(MEASURED[0], (1.0, 1.0, 1.0)), "of length 4"),
        (measuring(MEASURED[0], (1.0,) * 5), "of length 4"),
        (measuring(*[MEASURED[0]] * 3), "3 regions have measured, of 2"),
        (measuring(), "0 regions have measured, of 2"),
        (lambda d: d["trainers"]["live"]["0"].update(request=0), "trainers: "),
        (lambda d: d.update(trainers=None), "trainers: "),
        (lambda d: d["trainers"]["live"].clear(), "trainers: there are none"),
        (lambda d: d["in_flight"].pop("trainer_1/"), "its states are ['trainer_0/'], and its"),
        (lambda d: d["trainers"]["live"].pop("1"), "its document tells of ['trainer_0/']"),
        (lambda d: d.pop("trainers"), "its document tells of ['']"),
    ],
)
def test_a_damaged_document_is_refused_with_its_path(change, told, saved, monkeypatch):
    with pytest.raises(DamagedError) as error:
        restored(saved, monkeypatch, change)
    text, path = str(error.value), saved[0] / "0"
    assert text.startswith(f"{path}: ") and told in text and "\n" not in text


def test_trainers_and_policies_that_the_engine_lacks_are_named(saved, monkeypatch):
    def without_memory(document):
        document["trainers"]["live"]["0"]["policy"] = {}

    with pytest.raises(ValueError, match=re.escape("trainer 1: saved -> missing")) as error:
        restored(saved, monkeypatch, without_memory, made(count=1))
    assert "policy of trainer 0: [] -> ['across', 'along', 'signal', 'weight']" in str(error.value)
