"""A limit of open files that is too low is raised, or told in one line before any work."""

import subprocess
import sys

OPEN = """
import resource, sys
import lowcomm_jax as lc
for soft, hard in ((64, 2048), (64, 64)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        where = f"{sys.argv[1]}/{hard}"
        lc.exchange.store(where, 0, 4, "run", transport=lc.exchange.peers()).close()
    except ValueError as error:
        print(error)
    else:
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def limited(soft, hard, command):
    """A command under these limits of open files."""
    within = f'ulimit -S -n {soft} && ulimit -H -n {hard} && exec "$@"'
    return subprocess.run(
        ["bash", "-c", within, "bash", *command], capture_output=True, text=True, timeout=170
    )


def assert_told(shown):
    """In one line."""
    assert "may open 64 files, and one of 4 regions needs 272" in shown, shown
    assert "`ulimit -Hn 272`" in shown and "Traceback" not in shown


def test_a_low_limit_is_raised_where_the_hard_one_allows_and_else_told(tmp_path):
    done = limited(64, 2048, [sys.executable, "-c", OPEN, tmp_path.as_uri()])
    raised, _, told = done.stdout.strip().partition("\n")
    assert raised == "2048", done.stderr
    assert_told(told + done.stderr)
    assert not (tmp_path / "64").exists()


def test_a_hard_limit_that_is_too_low_is_one_line_of_launch(tmp_path):
    command = [sys.executable, "-m", "experiments", "launch", "--config=diloco"]
    command += ["--config.regions=4", f"--workdir={tmp_path / 'run'}"]
    done = limited(64, 64, command)
    assert_told(done.stdout + done.stderr)
    assert not (tmp_path / "run").exists() and done.returncode == 2
