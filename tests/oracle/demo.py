"""DeMo: sparse momentum exchanged at every step."""

import numpy as np

from oracle.codecs import CosineTopK, mean_over_senders
from oracle.compressed import Feedback, average
from oracle.loop import Trajectory, copy_tree, present_at, weights_at, zeros_like
from oracle.problem import Tree, gradient, loss


def run_demo(
    params: Tree,
    batches: dict,
    *,
    lr: float,
    weight_decay: float = 0.0,
    k: int = 32,
    block: int = 64,
    decay: float = 0.999,
    participants=None,
    weights=None,
) -> Trajectory:
    """Run DeMo (arXiv 2411.19870) with the learning rate outside of the momentum.

    m <- decay m + g; q = top cosine coefficients of m; m <- m - q; every coefficient averaged over
    its senders, decoded to u; w <- (1 - lr wd) w - lr sign(u). All gradients g are taken at the
    shared w. A region that sits out keeps values and momentum. `extra["direction"]` is u.
    """
    steps, count = batches["x"].shape[:2]
    anchor, direction = copy_tree(params), zeros_like(params)
    local = [copy_tree(params) for _ in range(count)]
    codec = CosineTopK(k, block)
    senders = [Feedback(codec, decay, params) for _ in range(count)]
    run = Trajectory()

    def fields(t, losses=()):
        return {
            "step": t,
            "anchors": [anchor],
            "locals": local,
            "momentum": [sender.residual for sender in senders],
            "losses": losses,
            "extra": {"direction": direction},
        }

    run.record(**fields(0))
    for t in range(1, steps + 1):
        seen = [(batches["x"][t - 1, r], batches["y"][t - 1, r]) for r in range(count)]
        losses = [float(loss(anchor, *seen[r])) for r in range(count)]
        present = present_at(participants, t, count)
        messages = {r: senders[r].encode(gradient(anchor, *seen[r])) for r in present}
        row = weights_at(weights, t, count)
        reduced = average(codec, mean_over_senders, messages, row, params)
        if reduced is not None:
            direction = reduced
            for key, u in direction.items():
                kept = (1 - lr * weight_decay) * anchor[key]
                anchor[key] = np.asarray(kept - lr * np.sign(u), u.dtype)
            for r in present:
                local[r] = copy_tree(anchor)
        run.record(**fields(t, losses))
    return run
