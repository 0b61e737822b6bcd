"""Every setting of a sweep, with its default.

A file in configs/sweep/ calls `sweep(...)`; the command line overrides any field:
`--config.over="('method.period=10,30,90',)" --config.common.steps=100`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict, config_dict

from experiments.compare.config import variant


def sweep(config: str, over: Sequence[str], **changes: Any) -> ConfigDict:
    """The config of a sweep.

    Args:
      config: the train config that is varied, a file in configs/ or its bare name.
      over: one text a field: `method.period=10,30,90` lists values, `inner.learning_rate=log(1e-4,
        1e-2)` and `method.alpha=uniform(0,1)` give ranges (only with `draws`).
      changes: any other field, see below.
    """
    fields = ConfigDict()
    fields.title = "Sweep"  # of its report
    fields.config = config
    fields.over = tuple(over)
    fields.draws = config_dict.placeholder(int)  # random points; None = the grid of all values
    fields.draw_seed = 0  # of the random points
    fields.seeds = (0,)  # every point is trained once with each
    # The rest is as in a comparison (experiments/compare/config.py).
    fields.equal = "tokens"
    fields.networks = ()
    fields.step_seconds = config_dict.placeholder(float)
    fields.parallel = 1
    fields.keep_checkpoints = False
    fields.compile_cache = config_dict.placeholder(str)
    fields.common = {}
    for key, value in changes.items():
        fields[key] = value
    return fields.lock()


def as_comparison(
    fields: Mapping[str, Any], points: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The fields of the comparison of all points; differences are taken from the first.

    Args:
      fields: of the sweep, plain.
      points: name -> fields of the train config, as nested dicts.
    """
    shared = ("title", "seeds", "equal", "networks", "step_seconds", "parallel")
    shared += ("keep_checkpoints", "compile_cache", "common")
    return {key: fields[key] for key in shared} | {
        "variants": {name: variant(fields["config"], **point) for name, point in points.items()},
        "baseline": next(iter(points)),
        "panels": {"all": {**_PANEL, "title": fields["title"], "variants": tuple(points)}},
    }


_PANEL = {"baseline": None, "equal_bytes": False}
