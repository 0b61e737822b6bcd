"""A function in a process of its own: what it gets, gives and raises."""

import io
import os

import numpy as np
import pytest

from lowcomm_jax.checkpoint import child_process
from lowcomm_jax.checkpoint.child_process import in_child_process


def test_arrays_there_and_back():
    arrays = {"a": np.arange(300_000.0), "b": np.arange(6).reshape(2, 3).T, "c": np.zeros((0, 2))}
    found = in_child_process(dict, arrays)
    for name, x in arrays.items():
        np.testing.assert_array_equal(found[name], x)
        assert found[name].dtype == x.dtype and found[name].flags.writeable


def test_an_error_is_raised_here_and_an_end_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        in_child_process(os.stat, "nowhere.txt")
    with pytest.raises(RuntimeError, match="_exit ended with code 3, in its own process"):
        in_child_process(os._exit, 3)


def test_an_answer_that_breaks_off_inside_an_array_is_none():
    """Else the rest of it would be zeros."""
    pipe = io.BytesIO()
    child_process._write(pipe, np.arange(8.0))
    for missing in (1, 8, 64):
        with pytest.raises(EOFError):
            child_process._read(io.BytesIO(pipe.getvalue()[:-missing]))


def test_it_prints_beside_its_answer_and_a_terminals_signals_do_not_reach_it():
    assert in_child_process(print, "to stderr") is None
    assert in_child_process(os.getsid, 0) != os.getsid(0)


def test_it_touches_no_accelerator(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert in_child_process(os.getenv, "JAX_PLATFORMS") == "cpu"
