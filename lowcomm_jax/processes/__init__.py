"""The processes of one `jax.distributed` job, as one program: the first decides, all follow."""

from lowcomm_jax.processes.arrays import fetch, place, whole
from lowcomm_jax.processes.team import ProcessLostError, Team, opened, team

__all__ = ["ProcessLostError", "Team", "fetch", "opened", "place", "team", "whole"]
