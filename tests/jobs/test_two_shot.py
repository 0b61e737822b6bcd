"""Jobs that reduce payloads in slices end with the bits of the mesh's two-shot reduction."""

import pytest
from jobs.test_same_numbers import RULE, assert_same, expected
from jobs.together import CUT, in_jobs

import lowcomm_jax as lc

INT4 = {"name": "int4", "error_feedback": 0.9, "reduce": "two_shot"}
METHODS = {
    "dense": lambda: lc.methods.diloco(4, RULE),
    "int4": lambda: lc.methods.diloco(4, RULE, codec=INT4),
    "streaming": lambda: lc.methods.streaming_diloco(
        6, 3, 2, 0.3, pattern=CUT, outer=RULE, codec="e3m0"
    ),
}


@pytest.mark.parametrize("name, regions", [("dense", 3), ("int4", 3), ("int4", 4), ("streaming", 4)])
def test_anchors_and_parameters_are_those_of_the_mesh(name, regions, between):
    together = expected(METHODS[name](), regions, 10)
    jobs = in_jobs(between(regions), METHODS[name](), regions, 10)
    assert_same(jobs, together, False)
