"""Facts that no machine changes, against the files of `tests/golden/`.

Wire bytes of every codec; what the methods of the quick comparison send, when, and the seconds that
takes in virtual time; plans of `configs/plan`. Losses are none of them: bits depend on the machine
(`same_as.py` compares them, and the programs that each method compiles).

    python tests/test_golden.py --write [NAME ...]

writes all files anew, or those named; then read the diff. Others have golden files of their own
(`tests/aot`), or tests: nothing compiles after the warm-up (`engine/test_fast_path.py`).
"""

import functools
import importlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where pytest does not start it
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from codec_cases import SHAPES, build  # noqa: E402
from rich.console import Console  # noqa: E402

from configs.compare import quick  # noqa: E402
from experiments.compare.plan import plan as comparison_of  # noqa: E402
from experiments.plan import goodput  # noqa: E402
from experiments.plan import main as planning  # noqa: E402
from experiments.train.job import make_engine, make_model  # noqa: E402
from experiments.train.resolve import resolve  # noqa: E402
from lowcomm_jax import compression  # noqa: E402
from lowcomm_jax.models.protocol import abstract_params  # noqa: E402
from lowcomm_jax.network import replay  # noqa: E402

FOLDER = ROOT / "tests" / "golden"
ODD = SHAPES | {"row": (301,), "narrow": (13, 1), "matrix": (128, 96), "large": (257, 134)}


def codecs() -> dict:
    """Bytes of one leaf's payload, by codec and shape; of low rank with rank 3."""

    def nbytes(name, key, shape):
        return build(name).nbytes({key: jax.ShapeDtypeStruct(shape, jnp.float32)})

    return {
        name: {f"{key} {shape}": nbytes(name, key, shape) for key, shape in ODD.items()}
        for name in compression.names()
    }


SMALL = {"layers": 1, "width": 128, "heads": 2, "kv_heads": 1, "mlp_width": 192}


class StandIn:
    """A model with the parameters of another one, and a loss that takes no time to compile.

    Where a method decides by numbers (ranks, batches, ranked fragments), it decides by this loss's.
    """

    def __init__(self, model):
        self.init, self.specs, self.config = model.init, model.specs, model.config

    @staticmethod
    def loss_fn(params, batch, rng):
        del rng
        # Leaves go ways of their own, so that no two fragments tie where a method ranks them.
        one, other = batch["x"].mean(axis=0)
        slopes = (one * np.cos(i) + other * np.sin(i) for i in range(1000))
        loss = sum(slope * jnp.mean(x) for slope, x in zip(slopes, jax.tree.leaves(params)))
        return loss, {"tokens": jnp.float32(batch["x"].size)}


def stream(trainer, start, count):
    """Samples `[R, count, 2]` of a step or of a trainer."""
    rng = np.random.default_rng([trainer, start])
    return {"x": rng.standard_normal((4, count, 2)).astype(np.float32)}


@functools.cache
def comparison():
    with tempfile.TemporaryDirectory() as folder:
        return comparison_of(quick.get_config(), folder)


def compared(variant: str) -> dict:
    """Of a method of the quick comparison, with a small model on one device: its events, and its
    bytes and seconds on the comparison's network."""
    (spec,) = (run for run in comparison().runs if run.variant == variant)
    changes = {"mesh": {"region": 1, "fsdp": 1}, "model": SMALL}
    sections = {name: {**spec.fields[name], **new} for name, new in changes.items()}
    job = resolve({**spec.fields, **sections, "codec_error": False}, spec.workdir)
    model = make_model(job, job.model)
    shapes = abstract_params(model)
    engine = make_engine(job, StandIn(model))
    state = engine.init(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
    if job.method.adapts:
        _, history = engine.run(state, stream, steps=job.steps)
    else:
        batches = [stream(0, step, job.batch) for step in range(job.steps)]
        _, history = engine.run(state, batches)
    rows = list(history.rows())
    (links,) = comparison().networks.values()
    clock = replay(links.network.with_median_step(links.step_seconds), rows, record_from=None)
    report = clock.report()
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
        "events": events(rows),
        "links": {f"{a} -> {b}": int(n) for (a, b), n in clock.ledger.links().items()},
        "sent": report.sent_R.tolist(),
        "seconds": rounded(report.wall_s),
        "utilisation": rounded(report.utilisation_R.tolist()),
    }


def events(rows) -> list[str]:
    """`send 0 by two_shot, 3969536 B, sent 5954304 B: 20 to 140 by 20`: what is alike, with its
    steps."""
    steps = {}
    for row in rows:
        for event in row["events"]:
            text = f"{event['kind']} {event['fragment']}"
            if event.get("trainer") is not None:
                text += f" of trainer {event['trainer']}"
            if event["kind"] == "send":
                text += f" by {event['route']}, {event['nbytes']} B"
            else:
                text += f", {'/'.join(distinct(event['staleness']))} steps old"
            sent = distinct(event["bytes_sent"])
            text += "" if sent == ["0"] else f", sent {'/'.join(sent)} B"
            steps.setdefault(text, []).append(row["step"])
    return [f"{text}: {spans(at)}" for text, at in steps.items()]


def distinct(values) -> list[str]:
    return [str(value) for value in sorted(set(values))]


def spans(steps: list[int]) -> str:
    """Steps; evenly spaced ones as `20 to 140 by 20`."""
    gaps = set(np.diff(steps).tolist())
    if len(steps) > 3 and len(gaps) == 1:
        return f"{steps[0]} to {steps[-1]} by {gaps.pop()}"
    return ", ".join(map(str, steps))


def rounded(value):
    """Numbers with six digits: the seventh is the summation's."""
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(x) for x in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


ROW = ("payload_bytes", "sent_bytes_per_period", "transfer_s", "utilisation", "hours", "speedup")
ROW += ("loss_with_penalty",)


def planned(name: str) -> dict:
    """Of a config of `configs/plan`: what each row comes to, and the best settings."""
    config = importlib.import_module(f"configs.plan.{name}").get_config()
    console = Console(file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(planning, "picture"):
        if name.startswith("goodput"):
            result = goodput.answer(config.to_dict(), folder, console)
            kept = ("chips", "regions", "method", "goodput", "uptime")
            return {"rows": [rounded({k: row[k] for k in kept}) for row in result["rows"]]}
        result = planning.planned(config, folder, console)
    rows = {
        row["method"]["name"]: {k: row[k] for k in ROW} | {"state": row["memory"]["state_total"]}
        for row in result["rows"]
    }
    return rounded({"params": result["params"], "rows": rows, "best": result["best"]})


FILES = {"codecs": codecs}
FILES |= {
    f"quick_{variant}": functools.partial(compared, variant)
    for variant in sorted(quick.get_config().variants)
}
FILES |= {
    f"plan_{file.stem}": functools.partial(planned, file.stem)
    for file in sorted((ROOT / "configs" / "plan").glob("[a-z]*.py"))
}


def shown(value, indent: str = "") -> str:
    """JSON of which a diff is easily read: what fits into a long line stands in one."""
    line = json.dumps(value, sort_keys=True)
    if len(line) <= 240 or not isinstance(value, dict | list):
        return line
    deeper = indent + " "
    if isinstance(value, list):
        parts = [shown(x, deeper) for x in value]
    else:
        parts = [f"{json.dumps(k)}: {shown(value[k], deeper)}" for k in sorted(value)]
    first, last = "[]" if isinstance(value, list) else "{}"
    return f"{first}\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}{last}"


def text_of(name: str) -> str:
    with jax.numpy_dtype_promotion("standard"):
        return shown(FILES[name]()) + "\n"


@pytest.mark.parametrize("name", FILES)
def test_as_written(name):
    assert text_of(name) == (FOLDER / f"{name}.json").read_text()


def test_no_file_is_left_over():
    assert {file.stem for file in FOLDER.iterdir()} == set(FILES)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(__doc__)
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[2:] or FILES:
        (FOLDER / f"{name}.json").write_text(text_of(name))
