"""Signals become a flag; a second one acts at once."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lowcomm_jax.interrupt import EXIT_INTERRUPTED, Interrupt


def test_exit_code():
    assert EXIT_INTERRUPTED == os.EX_TEMPFAIL == 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_only_sets_the_flag(number):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
        assert interrupt.signal is number
    assert signal.getsignal(number) is before


@pytest.fixture
def keyboard():
    """Ctrl-C as in a terminal; a suite started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("keyboard")
def test_second_signal_acts_at_once():
    before = signal.getsignal(signal.SIGINT)
    interrupt = Interrupt(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


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
    """Acknowledged within a second; the second signal ends the process at once."""
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
            assert time.monotonic() - sent < 5  # at once, on a busy machine too
            process.send_signal(number)
            # -number: the main thread acts itself, on a busy machine that has not begun that work
            # yet. Of a KeyboardInterrupt Python's exit then waits for the work.
            assert process.wait(150) in (128 + number, -number)
            assert process.returncode < 0 or time.monotonic() - sent < 20
        finally:
            process.kill()


LOOP = """
import signal, sys, time
from lowcomm_jax.interrupt import EXIT_INTERRUPTED, Interrupt
if sys.argv[1] == "background":  # as shells start what a script puts there
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with Interrupt() as interrupt:
    print("ready", flush=True)
    for step in range(3000):
        time.sleep(0.02)
        if interrupt.requested and sys.argv[1] == "polite":
            print("saved", flush=True)
            sys.exit(EXIT_INTERRUPTED)
        if interrupt.requested:
            print("busy", flush=True)
"""


@pytest.mark.parametrize(
    "manner,number,signals,code,output",
    [
        ("polite", signal.SIGTERM, 1, EXIT_INTERRUPTED, "saved"),
        ("stubborn", signal.SIGTERM, 2, -signal.SIGTERM, "busy"),
        ("background", signal.SIGINT, 2, -signal.SIGINT, "busy"),
    ],
)
def test_a_process(manner, number, signals, code, output):
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, manner],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{output}\n"
        deadline = time.monotonic() + 30
        if signals == 2:
            process.send_signal(number)
        process.stdout.read()
        assert process.wait() == code
        assert time.monotonic() < deadline
