"""Signals become a flag; a second one acts at once."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time

import pytest

from lowcomm_jax import interrupt
from lowcomm_jax.interrupt import (
    AGAIN_S,
    EXIT_INTERRUPTED,
    Interrupt,
    InterruptedBeforeError,
    raised,
)


def test_exit_code():
    assert EXIT_INTERRUPTED == os.EX_TEMPFAIL == 75


SAVING = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """Ctrl-C as in a terminal (a suite in the background ignores it), and a shorter wait."""
    monkeypatch.setattr(interrupt, "AGAIN_S", 0.3)
    before = {number: signal.getsignal(number) for number in SAVING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SAVING)
def test_first_signal_only_sets_the_flag(number):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
        assert interrupt.signal is number
    os.kill(os.getpid(), number)  # a copy that comes after the block
    time.sleep(0.3)
    with Interrupt() as interrupt:
        assert not interrupt.requested
    assert signal.getsignal(number) is before


def test_what_a_signal_raises_passes_where_libraries_pass_over_errors():
    """JAX does so where it reads a compiled program: the signal would be lost."""
    lost = contextlib.suppress(Exception)
    with pytest.raises(InterruptedBeforeError, match="SIGTERM"), raised(), lost:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)


def test_only_the_same_signal_later_acts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGUSR1)  # not the same
        assert interrupt.signal is signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_after_the_block_and_its_copies_is_the_programs_own():
    with Interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)  # of a launcher
    time.sleep(0.3)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_copy_for_an_outer_block_that_raises_is_dropped():
    def act(number):
        raise KeyboardInterrupt

    with Interrupt(act=act):
        with Interrupt() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.requested
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Interrupt(act=act):
        os.kill(os.getpid(), signal.SIGTERM)


OWN = {"ignored": signal.SIG_IGN, "a handler": lambda number, frame: None}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("own", [*OWN, "faulthandler"])
def test_a_signal_with_a_use_of_its_own_keeps_it(number, own, tmp_path):
    with (tmp_path / "stacks").open("w") as file:
        if own == "faulthandler":
            faulthandler.register(number, file)
        else:
            signal.signal(number, OWN[own])
        try:
            with Interrupt() as interrupt:
                os.kill(os.getpid(), number)
                assert not interrupt.requested
                os.kill(os.getpid(), signal.SIGTERM)
                assert interrupt.requested
        finally:
            faulthandler.unregister(number)


def test_can_be_entered_again():
    interrupt = Interrupt(signal.SIGTERM)
    with interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
    with interrupt:
        assert not interrupt.requested


def test_one_inside_another_shares_the_first_signal():
    with Interrupt(signal.SIGTERM) as outer:
        with Interrupt(signal.SIGTERM) as first:
            assert not first.requested and not outer.requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert first.requested
        assert outer.requested and outer.signal is signal.SIGTERM
        with Interrupt(signal.SIGTERM) as second:
            assert second.requested
    with Interrupt(signal.SIGTERM) as alone:
        assert not alone.requested


WAITING = """
import sys, time
import jax, jax.numpy as jnp
from lowcomm_jax.interrupt import Interrupt
x = jnp.eye(256)
long = jax.jit(lambda n: jax.lax.fori_loop(0, n, lambda i, y: y @ x, x)).lower(1).compile()
with Interrupt():
    print("ready", flush=True)
    jax.block_until_ready(long(30_000))  # many seconds
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_the_main_thread_waits_for_the_device(number):
    """Acknowledged at once; the second signal ends the process at once."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)  # in the device's work by now
            process.send_signal(number)
            sent = time.monotonic()
            # Plug-ins may have said something before.
            shown = iter(process.stderr.readline, "")
            said = f"{number.name}: stopping after what is under way"
            assert any(said in line for line in shown)
            # It has said so while it waits: it still does so below. The copy of a launcher changes
            # nothing, nor does another signal.
            process.send_signal(number)
            process.send_signal(signal.SIGUSR1)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(AGAIN_S + 0.2)
            process.send_signal(number)
            # -number: the main thread acts itself, on a busy machine that has not begun that work
            # yet. Of a KeyboardInterrupt Python's exit then waits for the work.
            assert process.wait(150) in (128 + number, -number)
            assert process.returncode < 0 or time.monotonic() - sent < 20
        finally:
            process.kill()


LOOP = """
import sys, time
from lowcomm_jax.interrupt import EXIT_INTERRUPTED, Interrupt
with Interrupt() as interrupt:
    print("ready", flush=True)
    for step in range(3000):
        time.sleep(0.02)
        if interrupt.requested and sys.argv[1] == "polite":
            break
        if interrupt.requested:
            print("busy", flush=True)
    time.sleep(1)  # as a save may take
    print("saved", flush=True)
time.sleep(0.5)
sys.exit(EXIT_INTERRUPTED)
"""
PYTHON = [sys.executable, "-c", LOOP, "polite"]
TRAP = """
trap 'sleep 0.2; kill -TERM "$pid"' TERM INT
"$@" &
pid=$!
wait "$pid"
wait "$pid"
"""


@contextlib.contextmanager
def group(*command):
    """A process group of its own, as a terminal makes one for a command; killed at the end."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        pytest.param(PYTHON, signal.SIGINT, marks=pytest.mark.slow),  # Ctrl-C
        pytest.param(PYTHON, signal.SIGUSR1, marks=pytest.mark.slow),  # Slurm's --signal
        (["bash", "-c", TRAP, "bash", *PYTHON], signal.SIGINT),  # SIGTERM follows from the trap
        (["bash", "-c", TRAP, "bash", *PYTHON], signal.SIGTERM),  # twice
        # What comes to `timeout` it sends to its child, and to the group.
        pytest.param(["timeout", "600", *PYTHON], signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_group_saves(command, number):
    with group(*command) as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, number)
        time.sleep(0.1)
        assert process.stdout.read() == "saved\n"
        assert process.wait() == EXIT_INTERRUPTED


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
@pytest.mark.parametrize("ignored", [[], ["bash", "-c", "trap '' INT; exec \"$@\"", "bash"]])
def test_the_same_signal_later_ends_a_process_at_once(number, ignored):
    """Also where a script put it into the background, which ignores Ctrl-C."""
    with group(*ignored, *PYTHON[:-1], "stubborn") as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, number)
        assert process.stdout.readline() == "busy\n"
        time.sleep(AGAIN_S)
        os.killpg(process.pid, number)
        assert "saved" not in process.stdout.read()
        assert process.wait() == -number


@contextlib.contextmanager
def terminal(*command, **outputs):
    """A process that a terminal controls; gives it and the terminal."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", *command],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs) | outputs,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()


def test_a_terminal_that_is_gone_neither_ends_a_run_nor_its_save():
    with terminal(*PYTHON) as (process, ours):
        shown = b""
        while b"ready" not in shown:
            shown += os.read(ours, 1000)
        os.close(ours)
        assert process.wait() == EXIT_INTERRUPTED


@pytest.mark.slow
def test_nohup_goes_on_without_its_terminal(tmp_path):
    output = tmp_path / "output"
    with (
        output.open("w") as file,
        terminal("nohup", *PYTHON, stdout=file, stderr=subprocess.DEVNULL) as (process, ours),
    ):
        while "ready" not in output.read_text():
            time.sleep(0.1)
        os.close(ours)
        time.sleep(0.5)
        assert output.read_text() == "ready\n"
        process.terminate()
        assert process.wait() == EXIT_INTERRUPTED
    assert output.read_text() == "ready\nsaved\n"
