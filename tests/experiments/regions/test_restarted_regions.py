"""Who was killed and comes back when the others have ended takes their result."""

import signal

import pytest
from launched import Configured, ends, fields_of

from experiments.metrics import read_records
from experiments.workdir import METRICS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]


@pytest.mark.parametrize("exchange", ["peers", "store"])
def test_who_comes_back_when_the_others_have_ended_takes_their_result(tiny, root, exchange):
    """Nobody is there any more; it ends with 0 and the same model, and trains nothing alone."""
    fields = {**fields_of(tiny.arguments(root)), "regions": 2, "exchange": exchange}
    fields |= {"method.period": 6, "log.every": 6, "checkpoint.every": 12, "steps": 240}
    with Configured(root, 2, "configs/diloco.py", fields) as run:
        run.reached(1, 24)
        run.jobs[1].signal(signal.SIGKILL)
        run.jobs[1].processes[0].wait()
        run.until(lambda: run.jobs[0].poll() is not None)
        run.start(1)
        run.until(lambda: run.jobs[1].poll() is not None)
        assert run.exits() == [0, 0], run.shown(1)
        assert "came into the run at step 240" in run.shown(1)
        _, last = ends([job.workdir for job in run.jobs])
        assert last[0]["anchor"] == last[1]["anchor"]
        own = [
            r["step"] for r in read_records(run.jobs[1].workdir / METRICS) if r["kind"] == "step"
        ]
    assert 24 <= max(own) < 240
