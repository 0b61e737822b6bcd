"""Every setting of a comparison, with its default and what it is: a table.

A file in configs/compare/ calls `comparison(...)`; the command line overrides any field:
`--config.seeds="(0,1)" --config.parallel=2 --config.common.steps=100`. The table is printed by
`compare --help --config=...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from experiments.cli import Field, closest, defaults, refuse_incomplete

RESULT, REPORT = "compare.json", "report.html"  # files of a comparison
EQUAL = ("tokens", "steps", "bytes", "time")  # what all variants may get the same of
SIZED = ("common", "variants", "panels", "baseline", "target")  # fields that a size replaces
BUDGETED = ("bytes", "time")  # every variant's steps follow from the baseline's cost

_ROWS = {
    "title": ("Comparison", "title of its report"),
    "seeds": ((0, 1, 2), "every variant is trained once with each"),
    "baseline": (str, "the variant that differences are taken from"),
    "equal": (
        "tokens",
        "What all variants get the same of: tokens or steps, which is checked; or bytes, or time "
        "(virtual, on the first network), by which each variant's steps are chosen.",
    ),
    "target": (float, "loss to be reached; None = the baseline's worst final one"),
    "networks": (
        (),
        "presets or files of links: every run is replayed on each in virtual time",
    ),
    "step_seconds": (
        float,
        "seconds of a region's inner step on these networks; None = the network's own",
    ),
    "parallel": (1, "runs at once, each in its own process if more than one"),
    "keep_checkpoints": (True, "whether checkpoints of finished runs are kept"),
    "compile_cache": (
        str,
        "folder of compiled programs, or off; None = xla in the user's cache folder",
    ),
    "common": ({}, "Fields of the train config that all variants share."),
    "variants": (
        {},
        "By name: `config`, a file in configs/ or its bare name, and in `set` what differs from it "
        "and from `common`.",
    ),
    "vary": (
        (),
        "Fields that are varied, a text each: method.period=10,30,90 lists values. With draws a "
        "range may stand there, log(low,high) or the same with uniform. Each variant becomes one "
        "for every point: the grid of all values, or so many random ones.",
    ),
    "draws": (int, "number of random points; None = the whole grid"),
    "draw_seed": (0, "seed of the random points"),
    "panels": (
        {},
        "Tables and plots by key, in order of the keys: a title, the variants in their order, the "
        "baseline (None = the comparison's), and whether they are meant to send equal bytes. Empty "
        "= one of everything.",
    ),
    "size": (str, "the size that is chosen, a name of `sizes`"),
    "sizes": ({}, f"By name: fields that replace the comparison's, of {', '.join(SIZED)}."),
}
FIELDS = {name: Field(*row) for name, row in _ROWS.items()}


def comparison(
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    baseline: str | None = None,
    **changes: Any,
) -> ConfigDict:
    """The config of a comparison.

    Args:
      variants: name -> `variant(...)`; a name is also the name of a folder. Their order is that of
        the alphabet (as in every ConfigDict); a panel shows its own in the order it gives.
      baseline: the variant that differences are taken from.
      changes: any other field of `FIELDS`.

    Raises:
      ValueError: there are no such fields; names near misses.
    """
    config = defaults(FIELDS)
    if baseline:
        config.baseline = baseline
    if variants:
        config.variants = variants
    known = list(config)
    unknown = [
        f"{key}: there is no such field{closest(key, known)}" for key in changes.keys() - known
    ]
    if unknown:
        raise ValueError(f"comparison(): {'; '.join(sorted(unknown))}")
    for key, value in changes.items():
        config[key] = value
    return config.lock()


def refuse_unmade(config: Mapping[str, Any]) -> None:
    """Let no config of a comparison pass that `comparison` has not made.

    Raises:
      RefusedError: fields are missing, or None where that stands for nothing.
    """
    refuse_incomplete(config, comparison(), "experiments.compare.config.comparison")


def variant(config: str, **changes: Any) -> dict[str, Any]:
    """A train config and what differs from it.

    Args:
      config: a file in configs/ or its bare name, `diloco`, `configs/cocodc.py:published`.
      changes: fields of the train config. Sections are dicts, which are merged into the config's
        sections; a rule of another name replaces the config's rule (`outer={"name": "sgd"}`).
    """
    return {"config": config, "set": changes}


def panel(
    title: str, variants: tuple[str, ...], baseline: str | None = None, equal_bytes: bool = False
) -> dict[str, Any]:
    """One table and one plot.

    Args:
      title: its heading.
      variants: names of the variants that it shows, in this order.
      baseline: the variant that differences are taken from; None = the comparison's.
      equal_bytes: whether its variants of several regions are meant to send equal bytes; the
        comparison then reports those that did not.
    """
    return {
        "title": title,
        "variants": tuple(variants),
        "baseline": baseline,
        "equal_bytes": equal_bytes,
    }
