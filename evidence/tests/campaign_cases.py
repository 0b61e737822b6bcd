"""A small campaign, records made up for its cells, and a campaign that trains for two steps."""

import itertools

from evidence.campaign import tuning as rates
from evidence.campaign.cells import digest_of, fields_of
from evidence.campaign.config import arm, campaign, claim, size, stage, tuning
from evidence.campaign.ledger import VERSION, Records
from evidence.campaign.order import Points, cells_of
from evidence.campaign.plan import plan

OUTER = "method.outer.learning_rate=0.2,0.5"


def config(root, **changes):
    fields = {
        "records": str(root / "records"),
        "period": 2,
        "evaluations": 2,
        "common": {"data": {"seq_len": 8}},
        "sizes": {"small": size(1e3, 8), "large": size(4e3, 8)},
        "arms": {
            "ddp": arm("ddp", ("inner.learning_rate=1e-3,2e-3",)),
            "diloco": arm("diloco", (OUTER,)),
            "averaging": arm("local_sgd", ("inner.learning_rate=1e-3,2e-3",)),
        },
        "claims": {
            "equal": claim("DiLoCo is as good", "0000.00001", "diloco", "ddp", 0.01, "a gap"),
            "better": claim("It is better", "0000.00002", "diloco", "averaging", 0.0, "a gap"),
        },
        "stages": {
            "1": stage(("small",), (4, 8), (2,)),
            "2": stage(("large",), (4,), (2, 4), seeds=(0, 1, 2, 3)),
        },
        "tuning": tuning(rungs=((2, 2), (4, 1)), regions=2, seeds=(100, 101)),
    }
    return campaign(**{**fields, **changes})


def checked(root, **changes):
    return plan(config(root, **changes))


def record(found, cell, loss, **changes):
    """A record of a cell with a made-up loss (None: it failed)."""
    steps = cell.rounds * found.period
    curve = [[0, 0, 0, 0.0, 6.0], [steps, 100 * steps, 10 * steps, 0.1 * steps, loss]]
    return {
        "version": VERSION,
        "cell": vars(cell).copy(),
        "config_digest": digest_of(fields_of(found, cell)),
        "code": {"package": "0", "commit": "c" * 40, "changed": False},
        "machine": {"system": "Linux", "cpus": 2, "backend": "cpu", "device": "cpu"},
        "versions": {"jax": "0"},
        "core_seconds": 3.0,
        "failed": None if loss is not None else "it diverged",
        "corpus_digest": "d" * 64,
        "params": found.sizes[cell.size].params,
        "tokens": 100 * steps,
        "loss": loss,
        "exchanges": cell.rounds,
        "bytes_sent": 10.0 * steps,
        "allreduce_bytes": 200.0 * steps,
        "virtual": {"seconds": 0.1 * steps},
        "curve": curve,
        **changes,
    }


def put(ledger, cells, loss_of):
    """Add records of cells; `loss_of(cell)` gives each one's loss."""
    for cell in cells:
        ledger.add(f"{cell.name}.json", record(ledger.campaign, cell, loss_of(cell)))


def ledger_of(campaign, loss_of, stages=("1",)):
    """Tuned (rates 0.5 and 2e-3 are the best), with every reported cell of some stages."""
    ledger = Records(campaign)
    for pair in itertools.product(campaign.arms, campaign.sizes):
        while cells := rates.missing(ledger, *pair):
            put(ledger, cells, lambda c: 2.0 if c.point[-3:] in ("0_5", "e-3") else 3.0)
    points = Points(ledger)
    for one in campaign.claims.values():
        for key in stages:
            for rung, seeds in one.ladder[key].items():
                cells = cells_of(one, rung, seeds, points)
                put(ledger, [c for c in cells if not ledger.done(c)], loss_of)
    return ledger


def jitter(cell):
    """What pairing does not take away: 0.1 %, of mean 0 over three seeds."""
    return (-0.001, 0.0, 0.001, 0.0)[cell.seed]


def tiny(root):
    """Settings of the smallest run, on the texts of a folder."""
    heads = {"heads": 2, "kv_heads": 1, "head_dim": 8}
    return {
        "model": {"layers": 1, "width": 16, "mlp_width": 24, **heads},
        "data": {
            "corpus": f"text:{root / 'texts'}",
            "cache_dir": str(root / "cache"),
            "val_fraction": 0.3,
            "seq_len": 32,
        },
        "mesh": {"region": 1, "fsdp": 1},
        "inner": {"warmup_steps": 0},
        "eval": {"every": 4, "sequences": 20, "batch": 8},
        "checkpoint": {"every": 0},
    }


def two_steps(root):
    """One claim at one rung, with runs of two steps each."""
    return config(
        root,
        period=1,
        common=tiny(root),
        sizes={"small": size(1e3, 4)},
        claims={"equal": claim("As good", "0000.00001", "diloco", "ddp", 0.01, "a gap")},
        stages={"1": stage(("small",), (2,), (2,))},
        tuning=tuning(rungs=((1, 2), (2, 1)), regions=2),
    )
