"""Rounds made by what is sent: SparseLoCo, MuLoCo, PULSELoCo and decoupled momentum."""

from collections.abc import Callable, Sequence

import numpy as np

from oracle.codecs import (
    CosineTopK,
    Message,
    Quantised,
    TopK,
    mean_encoded_again,
    mean_over_regions,
    mean_over_senders,
)
from oracle.loop import (
    Event,
    Regions,
    Trajectory,
    copy_tree,
    present_at,
    subtract,
    weights_at,
    zeros_like,
)
from oracle.problem import Tree

Mean = Callable[..., np.ndarray]


class Feedback:
    """One region's compressor with memory: p = x + decay e; e <- p - what receivers decode."""

    def __init__(self, codec, decay: float, like: Tree):
        self.codec, self.decay, self.residual = codec, decay, zeros_like(like)

    def encode(self, tree: Tree, anchor: Tree | None = None) -> dict[str, Message]:
        """Encode a tree and keep what is lost; with an anchor what bf16 would see of it may go."""
        messages = {}
        for key, x in tree.items():
            total = np.asarray(x + self.decay * self.residual[key])
            sent = total
            if anchor is not None:
                sent = np.where(bf16(anchor[key] - total) != bf16(anchor[key]), total, 0)
            messages[key] = self.codec.encode(np.asarray(sent, total.dtype))
            received = self.codec.decode(messages[key].values, total)
            self.residual[key] = np.asarray(total - received)
        return messages


def average(codec, mean: Mean, messages: dict[int, dict], weights, like: Tree) -> Tree | None:
    """Average what the regions sent, in region order; None if nobody with a weight did."""
    chosen = [weights[r] for r in messages]
    if sum(chosen) == 0:
        return None
    return {
        key: mean(codec, [messages[r][key] for r in messages], chosen, like[key]) for key in like
    }


def run_sparseloco(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    k: int = 64,
    block: int = 64,
    bits: int | None = 2,
    decay: float = 0.95,
    lr: float = 1.0,
    senders: bool = False,
    **who,
) -> Trajectory:
    """Run SparseLoCo (arXiv 2508.15706).

    e_r <- decay e_r + Delta_r; send Q(TopK(e_r)); e_r <- e_r - sent; Theta <- Theta - lr mean sent.
    The mean is over the regions, or over the `senders` of each entry.
    """

    codec = TopK(k, block, bits)
    mean = mean_over_senders if senders else mean_over_regions
    return _rounds(params, batches, period, inner, codec, decay, _descend(lr), mean=mean, **who)


def run_muloco(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    bits: int = 4,
    decay: float = 0.95,
    lr: float = 0.7,
    momentum: float = 0.6,
    slices: int | None = None,
    **who,
) -> Trajectory:
    """Run MuLoCo (arXiv 2505.23725): u <- mu u + lr Delta; Theta <- Theta - mu u - lr Delta.

    With `slices` the means of as many parts are coded a second time, each on its own.
    """

    step = _nesterov(lr, momentum)
    mean = {} if slices is None else {"mean": mean_encoded_again(slices)}
    return _rounds(params, batches, period, inner, Quantised(bits), decay, step, **mean, **who)


def run_pulseloco(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    k: int = 256,
    block: int = 64,
    decay: float = 1.0,
    lr: float = 0.7,
    momentum: float = 0.9,
    **who,
) -> Trajectory:
    """Run PULSELoCo (arXiv 2602.03839).

    p = Delta + decay e; of the entries where bf16(Theta - p) != bf16(Theta) the k largest of a
    chunk are sent; e <- p - sent; Theta moves by Nesterov of the mean over all regions.
    """
    codec, step = TopK(k, block), _nesterov(lr, momentum)
    return _rounds(params, batches, period, inner, codec, decay, step, gated=True, **who)


def bf16(x: np.ndarray) -> np.ndarray:
    """Round to bf16, half to even, as fp32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.asarray(bits & np.uint32(0xFFFF0000)).view(np.float32)


def run_decoupled(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    k: int = 32,
    block: int = 64,
    decay: float = 0.95,
    lr: float = 0.7,
    **who,
) -> Trajectory:
    """Run decoupled momentum (arXiv 2510.03371), descending along what was sent.

    e_r <- decay e_r + Delta_r; send the top cosine coefficients; e_r <- e_r - sent; q =
    coefficients averaged over their senders, decoded; Theta <- Theta - lr q.
    """

    codec, mean = CosineTopK(k, block), mean_over_senders
    return _rounds(params, batches, period, inner, codec, decay, _descend(lr), mean=mean, **who)


def _nesterov(lr: float, momentum: float) -> Callable:
    def step(anchor, mean, u):
        moved = {}
        for key in anchor:
            u[key] = np.asarray(momentum * u[key] + lr * mean[key])
            moved[key] = np.asarray(anchor[key] - momentum * u[key] - lr * mean[key])
        return moved, u

    return step


def _descend(lr: float) -> Callable:
    def step(anchor, mean, state):
        return {key: np.asarray(anchor[key] - lr * mean[key]) for key in anchor}, state

    return step


def _rounds(
    params,
    batches,
    period,
    inner,
    codec,
    decay,
    step,
    *,
    mean: Mean = mean_over_regions,
    gated: bool = False,
    participants=None,
    weights=None,
    finish=False,
) -> Trajectory:
    """H inner steps, then the mean of what everyone sends moves the one anchor by `step`."""
    steps, count = batches["x"].shape[:2]
    anchor, state = copy_tree(params), zeros_like(params)
    regions = Regions(params, inner, count)
    senders = [Feedback(codec, decay, params) for _ in range(count)]
    run = Trajectory()
    sent: list[np.ndarray] = []  # of every message, which entries travel

    def boundary(present: Sequence[int], row):
        nonlocal anchor, state
        weights_of = anchor if gated else None
        deltas = {r: subtract(anchor, regions.values[r]) for r in present}
        messages = {r: senders[r].encode(deltas[r], weights_of) for r in present}
        sent.extend(x.values != 0 for m in messages.values() for x in m.values())
        reduced = average(codec, mean, messages, row, params)
        if reduced is None:
            return False
        anchor, state = step(anchor, reduced, state)
        for r in present:
            regions.values[r] = copy_tree(anchor)
        return True

    def fields(t, losses=()):
        residuals = [copy_tree(sender.residual) for sender in senders]
        return {
            "step": t,
            "anchors": [anchor],
            "locals": regions.values,
            "momentum": [state],
            "losses": losses,
            "extra": {"residuals": residuals, "sent": list(sent)},
        }

    run.record(**fields(0))
    for t in range(1, steps + 1):
        losses = regions.step(batches, t)
        if t % period == 0:
            present = present_at(participants, t, count)
            landed = boundary(present, weights_at(weights, t, count))
            kinds = ("send", "land") if landed else ("skip",)
            run.events.extend(Event(t, kind, 0, 0, present) for kind in kinds)
        run.record(**fields(t, losses))
    if finish:
        boundary(range(count), weights_at(weights, steps, count))
        run.events.append(Event(steps, "final", 0, 0, tuple(range(count))))
        run.record_finished(**fields(steps))
    return run


def run_decoupled_as_coded(
    params: Tree,
    batches: dict,
    *,
    period: int,
    inner,
    k: int = 32,
    block: int = 64,
    decay: float = 0.95,
    lr: float = 0.7,
    participants=None,
    weights=None,
    finish=False,
) -> Trajectory:
    """Run decoupled momentum as its authors' code has it; every region keeps its own anchor.

    e <- decay e + Delta; e <- e - sent; q = coefficients averaged over their senders, decoded;
    e <- e + q; Theta <- Theta - lr (Delta + decay e). A region that sits out sends nothing and
    has no Delta, but hears q like everyone and moves its anchor by it; its values stay.
    """
    steps, count = batches["x"].shape[:2]
    anchors = [copy_tree(params) for _ in range(count)]
    regions = Regions(params, inner, count)
    codec = CosineTopK(k, block)
    senders = [Feedback(codec, decay, params) for _ in range(count)]
    run = Trajectory()

    def boundary(present: Sequence[int], row):
        deltas = {r: subtract(anchors[r], regions.values[r]) for r in present}
        messages = {r: senders[r].encode(deltas[r]) for r in present}
        q = average(codec, mean_over_senders, messages, row, params)
        if q is None:
            return
        for r in range(count):
            for key in params:
                e = np.asarray(senders[r].residual[key] + q[key])
                senders[r].residual[key] = e
                own = deltas[r][key] if r in present else np.zeros_like(e)
                anchors[r][key] = np.asarray(anchors[r][key] - lr * (own + decay * e))
            if r in present:
                regions.values[r] = copy_tree(anchors[r])

    def fields(t, losses=()):
        return {
            "step": t,
            "anchors": anchors,
            "locals": regions.values,
            "momentum": [sender.residual for sender in senders],
            "losses": losses,
        }

    run.record(**fields(0))
    for t in range(1, steps + 1):
        losses = regions.step(batches, t)
        if t % period == 0:
            boundary(present_at(participants, t, count), weights_at(weights, t, count))
        run.record(**fields(t, losses))
    if finish:
        boundary(range(count), weights_at(weights, steps, count))
        run.record_finished(**fields(steps))
    return run
