"""Who was killed and comes back when the others have ended takes their result."""

import pytest
from launched import Configured, fields_of

from experiments.metrics import read_records
from experiments.workdir import METRICS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]


@pytest.mark.parametrize("exchange", ["peers", "store"])
def test_who_comes_back_when_the_others_have_ended_takes_their_result(tiny, root, exchange):
    """Nobody is there any more; it ends with 0 and the same model, and trains nothing alone."""
    fields = {**fields_of(tiny.arguments(root)), "regions": 2, "exchange": exchange}
    fields |= {"method.period": 6, "log.every": 6, "checkpoint.every": 12, "steps": 240}
    with Configured(root, "configs/diloco.py", fields) as run:
        run.lose_until_the_end(1, 24)
        assert "came into the run at step 240" in run.shown(1)
        own = [
            r["step"] for r in read_records(run.jobs[1].workdir / METRICS) if r["kind"] == "step"
        ]
    assert 24 <= max(own) < 240
