"""Regions as separate jobs: what a config says of them, before their exchange is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.regions import transports
from lowcomm_jax.methods import Method
from lowcomm_jax.setup import DescribedExchange


def is_separate_job(fields: Mapping[str, Any]) -> bool:
    """Whether this job trains one region, and other jobs the others."""
    return fields["exchange"] != transports.MESH


def described(fields: Mapping[str, Any]) -> DescribedExchange | None:
    """The exchange between jobs that a config asks for; None on a mesh."""
    if not is_separate_job(fields):
        return None
    found, _ = transports.of(fields)
    lingers = found is not None and found.lingers
    return DescribedExchange(lingers, fields["region"], fields["regions"], fields["heal"])


def ends_by_rounds(fields: Mapping[str, Any], method: Method) -> bool:
    """Whether regions go at a pace of their own: jobs have rounds in common, but no steps."""
    return is_separate_job(fields) and method.schedule.by_rounds
