"""Models of one's own as configs name them: one of the least that works, and some that do not."""

import types

import jax
import jax.numpy as jnp


def pairs(vocab_size, scale=0.0, extra=(1, 2)):
    """Scores of the next token by the token before it; only `init` and `loss_fn`.

    Args:
      scale: of the first scores.
      extra: anything; it changes nothing.
    """
    del extra

    def init(rng):
        return {"table": scale * jax.random.normal(rng, (vocab_size, vocab_size))}

    def loss_fn(params, batch, rng):
        del rng
        tokens = batch["tokens"]
        scores = jax.nn.log_softmax(params["table"][tokens[:, :-1]])
        chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(chosen * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)

    return types.SimpleNamespace(init=init, loss_fn=loss_fn)


def pairs_with_logits(vocab_size):
    """`pairs`, whose evaluations take one pass."""
    model = pairs(vocab_size)
    model.logits = lambda params, tokens: params["table"][tokens]
    return model


def wrong_parts():
    """What a model may leave out is there, and wrong."""
    model = pairs(8)
    model.specs = lambda params, axis_sizes: {"table": None}
    model.flops_per_token = lambda seq_len: -1.0
    model.stacked = (1,)
    model.logits = lambda params, tokens: params["no"]
    return model


def named(name="x"):
    """Its keyword is a field of the section already."""
    return pairs(8, extra=name)


class Plain:
    """A class whose hints stand at its `__init__`.

    Args:
      size: of its vocabulary.
    """

    def __init__(self, size: int | None = None):
        self._model = pairs(8 if size is None else size)
        self.init, self.loss_fn = self._model.init, self._model.loss_fn


def lone_init():
    """It lacks loss_fn."""
    return types.SimpleNamespace(init=lambda rng: {"x": jnp.ones(3)})


def no_functions():
    """What should be functions are numbers."""
    return types.SimpleNamespace(init=0, loss_fn=1)


def vector_loss():
    """Its loss is no scalar."""
    return types.SimpleNamespace(
        init=lambda rng: {"x": jnp.ones(3)}, loss_fn=lambda params, batch, rng: params["x"]
    )


def failing_loss():
    """Its loss cannot be traced."""

    def loss_fn(params, batch, rng):
        return params["y"]

    return types.SimpleNamespace(init=lambda rng: {"x": jnp.ones(3)}, loss_fn=loss_fn)


def failing():
    """It cannot be made."""
    raise KeyError("no such thing")
