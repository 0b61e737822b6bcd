"""What engineers of a site meet first, as they see it: what jobs print, leave, and end with."""

import tempfile
from pathlib import Path

import pytest
from launched import Jobs, ends, fields_of, landings

from experiments.processes import free_port
from experiments.regions.main import RegionJob
from lowcomm_jax.runtime.participation import RUNNING

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

PERIOD = 6


class Sites(Jobs):
    """Regions of a tiny DiLoCo run, each with settings of its own."""

    def __init__(self, tiny, root, *own, **shared):
        fields = fields_of(tiny.arguments(root))
        fields |= {"regions": len(own), "exchange": "peers", "method.period": PERIOD}
        fields |= {"steps": 4 * PERIOD, "log.every": PERIOD, "eval.every": 0, **shared}
        home = Path(tempfile.mkdtemp(prefix="sites", dir=root))
        where, rest = (home, home / "meet"), [f"--compile_cache={root / 'cache'}"]
        super().__init__(
            [
                RegionJob("diloco", [*{**fields, **one}.items()], r, 1, *where, rest, 0)
                for r, one in enumerate(own)
            ]
        )


def test_an_address_that_others_cannot_reach_is_named_and_does_not_end_well(tiny, root):
    """Region 1 gets what region 0 sends, and nobody gets what it sends itself."""
    nowhere = f"127.0.0.1:{free_port()}"
    wrong = {"address": nowhere, "listen": "127.0.0.1:0"}
    with Sites(tiny, root, {}, wrong, deadline_s=1) as run:
        assert run.exits() == [0, 1], [run.shown(0), run.shown(1)]
        assert f"region 0 cannot reach region 1 at {nowhere}" in run.shown(0)
        assert "cannot reach" not in run.shown(1)
        assert "not counted" not in run.shown(0)
        assert f"was not counted in {RUNNING} exchanges running, and trains on" in run.shown(1)
        assert "train: complete (step 24), but the others counted nothing" in run.shown(1)
        there, away = run.runs()
        assert [e["participants"] for e in landings(there)] == [[True]] * 4
        assert [e["participants"] for e in landings(away)] == [[False]] * 4
        logs, last = ends([job.workdir for job in run.jobs])
        assert last[0]["anchor"] == last[1]["anchor"]
        assert [log[-1]["kind"] for log in logs] == ["end", "end"]
        # Whoever starts it again is told the same.
        run.start(1)
        assert run.exits(run.jobs[1]) == [1]
        assert run.shown(1).count("train: complete (step 24)") == 2
