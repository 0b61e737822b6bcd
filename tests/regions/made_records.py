"""Records of exchanges, made for tests that need no store."""

from lowcomm_jax.store.commits import Job
from lowcomm_jax.store.records import Admitted, Commit


def commit_of(payloads, terms=None, writer=0, present=(), late=None, job=1):
    """A commit record of jobs that all have this incarnation."""
    admitted = {region: Admitted(job, payload) for region, payload in payloads.items()}
    return Commit(admitted, terms or {}, writer, dict.fromkeys(present, job), late or {})


def knows_jobs(heartbeat, region=0, incarnation=1):
    """Let a stand-in of a heartbeat know of one job in each region's place, the first one."""
    heartbeat.job = Job(region, incarnation)
    heartbeat.jobs = lambda regions: {r: [incarnation if r == region else 1] for r in regions}
    return heartbeat
