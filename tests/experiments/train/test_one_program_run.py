"""`train` as one program over several processes: its numbers, signals, deaths and refusals."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import two_hosts

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.processes import free_port
from experiments.report.runlog import read_run
from experiments.train.processes import EXIT_LOST
from experiments.workdir import METRICS, occupied
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

pytestmark = pytest.mark.usefixtures("one_device")


def arguments_of(tiny, root, config):
    given = [a for a in tiny.arguments(root) if ".mesh." not in a and "regions" not in a]
    return [f"--config={config}", *given]


class Program:
    """Processes of one program; `change` gives one of them other arguments, `env` other variables.

    `places`: words before the command of each, which put it on a host.
    """

    def __init__(
        self,
        tiny,
        root,
        name,
        count,
        *more,
        config="streaming_diloco",
        host="127.0.0.1",
        change=None,
        env=None,
        places=None,
    ):
        self.workdir, self.outputs = root / name, []
        self.workdir.mkdir(exist_ok=True)
        given = arguments_of(tiny, root, config)
        address, self.processes = f"{host}:{free_port()}", []
        for process in range(count):
            arguments = [*given, *more]
            if count > 1:
                arguments += [f"--coordinator={address}", f"--process={process}"]
                arguments += [f"--processes={count}"]
            arguments += [f"--workdir={self.workdir}", *(change or {}).get(process, [])]
            place = places[process] if places else []
            self.outputs.append(self.workdir / f"output.{process}.txt")
            with self.outputs[-1].open("ab") as output:
                self.processes.append(
                    subprocess.Popen(
                        [*place, sys.executable, "-m", "experiments", "train", *arguments],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **(env or {}).get(process, {})},
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.wait()

    def shown(self, process):
        return self.outputs[process].read_text()

    def exits(self, seconds=300):
        until = time.monotonic() + seconds
        return [p.wait(max(0.1, until - time.monotonic())) for p in self.processes]

    def reached(self, step):
        """Wait until this step is written."""
        path, until = self.workdir / METRICS, time.monotonic() + 300
        while not (path.is_file() and any(r.get("step", 0) >= step for r in read_records(path))):
            assert time.monotonic() < until and self.processes[0].poll() is None, self.shown(0)
            time.sleep(0.05)


def numbers(workdir):
    """What must not depend on how many processes there are."""
    run = read_run(workdir)
    kept = ("loss", "grad_norm", "bytes_sent", "participation", "events", "tokens")
    steps = [{name: step[name] for name in kept} for step in run.steps]
    return steps, [(e["anchor"], e["mean_of_regions"], e["document_sum"]) for e in run.evals]


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def told(run):
    """The lines about meeting, the same in all processes."""
    lines = [
        [line for line in run.shown(i).splitlines() if line.startswith("cannot meet")]
        for i in range(len(run.processes))
    ]
    assert all(own == lines[0] for own in lines) and len(lines[0]) == 1, run.shown(0)
    return lines[0][0]


SHORT = ("--config.steps=24", "--config.log.every=6", "--config.method.period=6")
BY_TWO = ["--config.regions=2", "--config.mesh.region=2"]


def test_two_processes_are_one(tiny, root):
    more = [*SHORT, "--config.regions=2"]
    with Program(tiny, root, "two", 2, *more) as two:
        assert two.exits() == [0, 0], two.shown(0) + two.shown(1)
    # In this process, which has JAX already.
    alone = [*arguments_of(tiny, root, "streaming_diloco"), *more, f"--workdir={root / 'one'}"]
    mesh = ["--config.mesh.region=2", "--config.mesh.fsdp=1"]
    assert main(["train", *alone, *mesh, "--quiet"]) == 0
    assert numbers(two.workdir) == numbers(root / "one")
    assert "devices found / expected: 2 / 2" in two.shown(0)
    assert "step" not in two.shown(1)  # the first one alone reports


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, more",
    [
        ("diloco", ["--config.regions=1", "--config.mesh.fsdp=2"]),
        ("adloco", BY_TWO),
        # Two stages: a region is both devices of a process.
        ("dilocox", [*BY_TWO, "--config.model.layers=2"]),
    ],
)
def test_every_kind_of_run(config, more, tiny, root):
    """Every way through the command; the methods themselves: `tests/mesh/test_one_program.py`."""
    several = [a for a in (*SHORT, *more) if "method" not in a or config != "adloco"]
    with Program(tiny, root, f"{config}2", 2, *several, config=config) as two:
        assert two.exits() == [0, 0], two.shown(0) + two.shown(1)
    with Program(tiny, root, f"{config}1", 1, *several, config=config) as one:
        assert one.exits() == [0], one.shown(0)
    assert numbers(two.workdir) == numbers(one.workdir)


@pytest.mark.slow
def test_a_signal_to_any_process_saves_and_the_same_command_continues(tiny, root):
    """To the first one, and after that to the second one."""
    more, last = ["--config.regions=2", "--config.steps=400", *SHORT[1:]], 0
    for process in range(2):
        with Program(tiny, root, "signal", 2, *more) as run:
            run.reached(last + 18)
            run.processes[process].send_signal(signal.SIGTERM)
            assert run.exits() == [EXIT_INTERRUPTED] * 2, run.shown(0)
        found = read_run(run.workdir).steps[-1]["step"]
        assert last + 18 <= found < 400
        last = found
    with Program(tiny, root, "signal", 2, *more) as run:
        assert run.exits() == [0, 0], run.shown(0)
    with Program(tiny, root, "whole", 1, *more, "--config.mesh.region=2") as whole:
        assert whole.exits() == [0]
    assert numbers(run.workdir)[0] == numbers(whole.workdir)[0]


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_killed_process_ends_the_others_which_name_it(process, tiny, root):
    more = ["--config.regions=2", "--config.steps=100000", *SHORT[1:]]
    with Program(tiny, root, f"killed{process}", 2, *more) as run:
        run.reached(18)
        struck = time.monotonic()
        run.processes[process].kill()
        code = run.processes[1 - process].wait(60)
        assert time.monotonic() - struck < 30
        # JAX itself may be faster, when it is the first process that has died.
        assert code in (EXIT_LOST, -signal.SIGABRT)
        assert f"process {process} of this job has ended" in run.shown(1 - process)


def test_processes_with_different_configs_name_the_field(tiny, root):
    """They have met, so that they can compare: by IPv6 where this machine has it."""
    change, more = {1: ["--config.inner.learning_rate=0.5"]}, [*SHORT, "--config.regions=2"]
    host = "[::1]" if has_ipv6() else "127.0.0.1"
    with Program(tiny, root, "differ", 2, *more, host=host, change=change) as run:
        assert run.exits() == [2, 2]
        for process in range(2):
            shown = run.shown(process)
            assert "config of processes 0 and 1 differ: inner.learning_rate: " in shown, shown
        assert not (run.workdir / METRICS).exists()


def test_a_coordinator_that_does_not_answer(tiny, root):
    address = f"127.0.0.1:{free_port()}"
    more = [*SHORT, "--config.regions=2", "--config.wait_minutes=0.05"]
    more += [f"--coordinator={address}", "--process=1", "--processes=2"]
    with Program(tiny, root, "nobody", 1, *more) as run:
        assert run.exits(60) == [2]
        assert f"nothing answers at the coordinator's address {address}" in run.shown(0)


def test_a_folder_in_use_is_refused_by_all_before_the_corpus_is_read(tiny, root):
    (root / "two").mkdir()
    with occupied(root / "two"), Program(tiny, root, "two", 2, *SHORT, *BY_TWO) as run:
        assert run.exits() == [2, 2], run.shown(0) + run.shown(1)
        shown = run.shown(0) + run.shown(1)
    assert f"in use by process {os.getpid()}" in shown and "reading the corpus" not in shown
    assert "has ended" not in shown


def test_fewer_devices_than_the_mesh(tiny, root):
    more = [*SHORT, "--config.regions=2", "--config.mesh.region=3"]
    with Program(tiny, root, "few", 2, *more) as run:
        assert run.exits() == [2, 2]
        for process in (0, 1):
            assert "needs 3 devices, 2 here" in run.shown(process)
            assert "=2 cuts a processor into as many, in each of 2 processes" in run.shown(process)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_devices_that_do_not_start_end_all_with_one_line(process, tiny, root):
    more, env = [*SHORT, "--config.regions=2"], {process: {"JAX_PLATFORMS": "abacus"}}
    with Program(tiny, root, f"abacus{process}", 2, *more, env=env) as run:
        assert run.exits(120) == [2, 2]
        assert f"process {process}: RuntimeError: Unable to initialize backend 'abacus'" in told(
            run
        )


@pytest.mark.slow
def test_a_coordinators_port_that_is_taken(tiny, root):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"--coordinator=127.0.0.1:{taken.getsockname()[1]}"
        more = [*SHORT, "--config.regions=2", where, "--process=0", "--processes=2"]
        with Program(tiny, root, "taken", 1, *more) as run:
            assert run.exits(60) == [2]
            assert "in use): give another coordinator" in told(run)


@pytest.mark.slow
@pytest.mark.skipif(bool(two_hosts.problems()), reason="; ".join(two_hosts.problems()))
def test_a_host_whose_name_resolves_to_loopback_says_so(tiny, root):
    """Two hosts, whose common name is that of this machine in /etc/hosts, or has no address."""
    name, more = socket.gethostname(), [*SHORT, "--config.regions=2"]
    with two_hosts.two_hosts() as places:
        host = two_hosts.ADDRESSES[0]
        with Program(tiny, root, "names", 2, *more, host=host, places=places) as run:
            assert run.exits(120) == [2, 2]
            line = told(run)
            assert f"the name of this host, {name}, " in line
            if "resolves to 127." in line:
                assert f"write in its /etc/hosts `{host} {name}`" in line
