"""A test that waits for ever fails, and the others still run."""

import subprocess
import sys

import pytest

HANGS = """
from concurrent.futures import Future, ThreadPoolExecutor

def test_waits_for_threads_that_wait_for_ever():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(Future().result).result()

def test_of_another_kind():
    pass
"""


def test_every_test_has_a_limit(request, pytestconfig):
    assert 0 < float(pytestconfig.getini("timeout")) <= 300
    # It reads the stacks of threads that run, and has crashed a slow test that was well.
    assert not float(pytestconfig.getini("faulthandler_timeout"))
    assert pytestconfig.getini("timeout_method") == "thread"
    assert pytestconfig.pluginmanager.has_plugin("timeout")
    assert request.node.get_closest_marker("timeout") is None


@pytest.mark.slow
def test_slow_tests_have_a_longer_one(request, pytestconfig):
    [seconds] = request.node.get_closest_marker("timeout").args
    assert float(pytestconfig.getini("timeout")) < seconds <= 3600


def test_a_test_that_hangs_fails_alone(tmp_path, pytestconfig):
    """The method of this suite, in a suite of its own with a shorter limit."""
    (tmp_path / "test_hangs.py").write_text(HANGS)
    method = pytestconfig.getini("timeout_method")
    limits = f"timeout = 2\ntimeout_method = {method}\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{limits}")
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "."]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert made.returncode == 1, made.stdout + made.stderr
    assert "1 failed, 1 passed" in made.stdout
    assert "crashed while running 'test_hangs.py::test_waits_for_threads" in made.stdout
    alone = [*command[:3], "-n", "0", *command[5:]]
    made = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert made.returncode == 1
    assert "in test_waits_for_threads_that_wait_for_ever" in made.stdout + made.stderr
