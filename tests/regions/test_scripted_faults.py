"""What a script of faults does to real jobs is what it does on a mesh."""

import pytest
from regions.test_same_numbers import METHODS, assert_same, expected
from regions.together import in_jobs

from experiments.faults.fault import Fault, participants
from experiments.faults.fault_hooks import ScriptedFaults

R = 3
FAULTS = [
    Fault(3, "late", region=0, steps=3, delay=0.3),
    Fault(4, "corrupt", region=1, steps=5),
    Fault(9, "slow", region=2, steps=3, mbit=0.05),
]


@pytest.mark.parametrize("name", ["sparseloco", pytest.param("diloco", marks=pytest.mark.slow)])
def test_damaged_payloads_count_as_missing_and_late_ones_are_waited_for(name, between):
    together = expected(METHODS[name](), R, 14, participants(FAULTS, R))
    made = {}

    def exchange(region):
        made[region] = between(R, fault_hooks=ScriptedFaults(FAULTS, region))(region)
        return made[region]

    assert_same(in_jobs(exchange, METHODS[name](), R, 14), together, False)
    damaged = [made[region].counts().get("rejected_damaged", 0) for region in range(R)]
    assert damaged[0] >= 2 and damaged[1] == 0 and damaged[2] >= 2
