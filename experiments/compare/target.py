"""Costs of a run until its loss first reached a target: steps, tokens, bytes, virtual time."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.compare.stats import crossing
from experiments.report.html_data import bytes_at, tokens_at, virtual_at
from experiments.report.virtual import StepSeconds
from experiments.runlog import RunLog, nominal_steps
from lowcomm_jax.network import Network

STEPS, TOKENS, BYTES = "steps", "tokens", "bytes_sent"

Cost = dict[str, float | None]


def seconds_on(network: str) -> str:
    """The key of the virtual time on a network."""
    return f"seconds_on_{network}"


def keys(networks: Mapping[str, Network]) -> tuple[str, ...]:
    """Names of the costs: (nominal) inner steps, tokens of all regions, bytes a region, seconds."""
    return (STEPS, TOKENS, BYTES, *map(seconds_on, networks))


def to_target(
    run: RunLog,
    target: float | None,
    networks: Mapping[str, Network],
    step_seconds: StepSeconds,
) -> Cost:
    """The cost of reaching the target, by `keys`; all None where it was not reached.

    The loss is the anchor's. Between two evaluations everything is interpolated linearly.
    """
    losses = [record["anchor"] for record in run.evals]
    found = None if target is None else crossing(losses, target)
    if found is None:
        return dict.fromkeys(keys(networks))
    series = {
        STEPS: [float(nominal_steps(run, record)) for record in run.evals],
        TOKENS: tokens_at(run),
        BYTES: bytes_at(run),
    }
    for name, network in networks.items():
        series[seconds_on(name)] = virtual_at(network, step_seconds)(run)
    return {key: found.of(values) for key, values in series.items()}
