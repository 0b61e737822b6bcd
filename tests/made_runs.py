"""Records of runs as `train` writes them, made by hand for tests of what reads them."""

from experiments.metrics import MetricsLog


def header(regions, here=None, **more):
    """Of a run of 24 steps; `here`: the regions of this log, all of them unless given."""
    here = range(regions) if here is None else here
    about = {"kind": "header", "here": list(here), "regions": regions, "steps": 24}
    about |= {"method": "diloco", "config": {}, "data": {"corpus": "made up"}, "consensus": None}
    sizes = {"params": 1000, "trained_params": 1000, "tokens_per_step": 10 * regions}
    return about | sizes | {"allreduce_bytes_per_step": 4000} | more


def event(kind, step, regions, **more):
    """A send or landing of fragment 0 in which all of so many regions take part."""
    fields = {"kind": kind, "step": step, "fragment": 0, "key": f"0@{step}", "route": "two_shot"}
    fields |= {"participants": [True] * regions, "staleness": [0] * regions, "nbytes": 1000}
    return fields | {"groups": None, "ahead": 0} | more


def step(number, regions, **more):
    """Of so many regions: a second and ten tokens a region each, and nothing sent."""
    fields = {"kind": "step", "step": number, "tokens": 10 * regions * number, "events": []}
    fields |= {"loss": [1.0] * regions, "seconds": float(number), "participation": None}
    fields |= {
        "tokens_per_second": 10.0 * regions,
        "disagreement": None,
        "skipped": [0.0] * regions,
    }
    return fields | {name: [0] * regions for name in ("bytes_sent", "bytes_received")} | more


def logged(path, *records, step=-1):
    """Write these records behind those of a log up to `step`; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = MetricsLog(path, step)
    log.write(list(records))
    log.close()
    return path
