"""How long the others may take after this job was cut off: four times as long as it took itself."""

import pytest

from lowcomm_jax.jobs import job_carrier
from lowcomm_jax.jobs.job_carrier import OutagePacing


def test_patience_is_four_times_our_own_pace(monkeypatch):
    """Two steps a second here: 10 steps may take 20 s elsewhere."""
    now = [100.0]
    monkeypatch.setattr(job_carrier.time, "monotonic", lambda: now[0])
    pacing = OutagePacing()
    assert pacing.patience_s(10) == 0.0  # nothing is deferred
    pacing.deferred(50)
    assert pacing.patience_s(10) == 0.0  # of one deferral no pace is known
    now[0] = 103.0
    pacing.deferred(56)
    assert pacing.patience_s(10) == pytest.approx(4 * 10 * 0.5)
    now[0] = 112.0
    pacing.deferred(62)  # since the first, not since the last
    assert pacing.patience_s(10) == pytest.approx(4 * 10 * 1.0)
