"""A region whose anchor does not hold comes back into its run."""

import io

import pytest
from rich.console import Console

from experiments.train import main as train
from lowcomm_jax.store.errors import Lost, Parted


def trains(monkeypatch, *results):
    """What `train` does when it is called once more."""
    left = list(results)

    def one(job, console, quiet):
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(train, "train", one)
    return left


def test_it_comes_back_and_says_so(monkeypatch):
    console = Console(record=True, width=200, file=io.StringIO())
    differ, gone = Parted("they differ", heals=True), Lost("a payload is gone")
    left = trains(monkeypatch, differ, gone, True)
    assert train.train_and_heal(None, console) and not left
    shown = console.export_text()
    assert "they differ; it comes back" in shown and "a payload is gone; it comes back" in shown


def test_where_nothing_holds_it_ends(monkeypatch):
    left = trains(monkeypatch, Parted("they differ", heals=False), True)
    with pytest.raises(Parted):
        train.train_and_heal(None, Console(quiet=True))
    assert left == [True]
