"""Advice runs: every line of Python in a message is found in the sources, and executed here.

What is found has a call with something in its parentheses, or stands in backquotes and assigns.
"""

import ast
import dataclasses
import functools
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from params.tiny_runs import X, engine

import lowcomm_jax as lc
from experiments.cli import fields, load_config, model_section
from experiments.config import base
from lowcomm_jax import exchange
from lowcomm_jax.aot.targets import Target

ROOT = pathlib.Path(__file__).parents[1]
PLACE = "\N{HORIZONTAL ELLIPSIS}"  # of what an f-string puts in
INSIDE = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))"
CALL = re.compile(
    rf"(?<![\w.\]])[A-Za-z_][\w.{PLACE}]*\({INSIDE}+\)(?:\.\w+\(\))*|`[^`]*[^=!<>]=[^=][^`]*`"
)
# Words of English and of mathematics, and patterns.
NO_CODE = {"document(s)", "microbatch(es)", "L(N, M)", "log(low,high)"}
NO_CODE |= {r"n((?:\d+ .*\n)*)"}
# Written by us into a file; not said to a user.
LEFT_OUT = ("experiments/report/html_page.py",)


def texts(file):
    """The texts of a file that are no docstrings or annotations; `PLACE` for what is put in."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    strings = (ast.Constant, ast.JoinedStr)
    alone = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    noted = [n.annotation for n in nodes if isinstance(n, ast.AnnAssign)]
    alone |= {id(part) for note in noted for part in ast.walk(note)}
    alone |= {id(part) for n in nodes if isinstance(n, ast.JoinedStr) for part in n.values}
    for node in nodes:
        if not isinstance(node, strings) or id(node) in alone:
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        kept = [part.value if isinstance(part, ast.Constant) else PLACE for part in parts]
        if all(isinstance(part, str) for part in kept):
            yield "".join(kept)


@functools.cache
def messages():
    """All texts of the sources."""
    return {
        text
        for room in ("lowcomm_jax", "experiments")
        for file in (ROOT / room).rglob("*.py")
        if not file.relative_to(ROOT).as_posix().startswith(LEFT_OUT)
        for text in texts(file)
    }


def advice():
    """Every line of code in a message."""
    found = {code for text in messages() if " " in text for code in CALL.findall(text)}
    return {code.strip("`") for code in found} - NO_CODE


@pytest.fixture(autouse=True)
def settings_of_a_user():
    """Other tests are stricter."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


PARAMS = {"w": np.ones(1, np.float32)}


def loss_fn(params, batch, rng):
    return jnp.mean((params["w"] - batch["x"]) ** 2) + 0 * jax.random.uniform(rng)


def made(loss=loss_fn, inner=None, method=None):
    return engine(loss, method or lc.methods.diloco(2), inner)


def trains(one, params=None):
    _, metrics = one.step(one.init(PARAMS if params is None else params), X[0])
    assert np.isfinite(np.asarray(metrics["loss"])).all()


def run(code, **names):
    """Execute one line; the names that there are afterwards."""
    space = {
        "lc": lc,
        "lowcomm_jax": lc,
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "nnx": nnx,
    } | names
    exec(code, space)
    return space


# -- what has been put in the place of each line ---------------------------------------------------


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(1, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.head(self.dropout(x, rngs=rngs))


SPLIT = "graph, params, rest = nnx.split(model, nnx.Param, ...)"
MERGE = "model = nnx.merge(graph, params, rest)"
CALLED = "model(x, rngs=nnx.Rngs(dropout=rng))"


def nnx_dropout(_):
    """The refusal's three lines, in the program of one who follows them."""
    space = run(SPLIT, model=Dropped(nnx.Rngs(0)))

    def loss(params, batch, rng):
        inside = run(MERGE, **space | {"params": params})
        inside = run(f"y = {CALLED}", **inside | {"x": batch["x"][:, None], "rng": rng})
        return jnp.mean((inside["y"] - 1.0) ** 2)

    trains(made(loss), space["params"])


def equinox_module(code):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(1, 1, 2, 1, key=jax.random.key(0))
    space = run(code, eqx=eqx, model=model)

    def loss(params, batch, rng):
        del rng
        return jnp.mean(jax.vmap(eqx.combine(params, space["static"]))(batch["x"][:, None]) ** 2)

    trains(made(loss), space["params"])


def signature(code):
    """A function that is written so is taken as a loss."""
    space = run(f"def {code}: return jnp.mean((params['w'] - batch['x']) ** 2)")
    trains(made(space["loss_fn"]))


def update(code):
    """An outer rule that is written so is taken."""
    write = code.replace(PLACE, "delta", 1).replace(PLACE, "")
    space = run(f"def {write}: return jax.tree.map(lambda x: x, delta), state")
    rule = optax.GradientTransformation(lambda params: optax.EmptyState(), space["update"])
    trains(made(method=lc.methods.diloco(2, outer=rule)))


UPDATE = "update(self, delta_RxN, state, weight_R, kind, momentum)"


def merged(code):
    """A merge that is written so is taken."""
    give = "lc.merge.Merged(delta_RxN.mean(0), state)"
    space = run(f"class Own(lc.merge.Merge):\n def {code}: return {give}")
    trains(made(method=dataclasses.replace(lc.methods.diloco(2), merge=space["Own"]())))


def weighed(code):
    """A `weigh` that is written so is taken, and its weights count."""
    give = "lc.merge.Merged(delta_RxN[0], state)"
    body = f" reads = 'norms'\n def {code}: return weight_R, state\n def {UPDATE}: return {give}"
    space = run(f"class Own(lc.merge.Merge):\n{body}")
    trains(made(method=dataclasses.replace(lc.methods.diloco(2), merge=space["Own"]())))


def parameter(function):
    """`Engine(accumulate=)` names a parameter that there is."""

    def check(code):
        (name,) = re.findall(r"\((\w+)=", code)
        assert name in inspect.signature(function).parameters

    return check


def expression(**names):
    return lambda code: run(f"result = {code}", **names)["result"]


def inner(code):
    trains(made(inner=expression()(code)))


def multi_steps(code):
    code = code.replace(PLACE, "MultiSteps").replace("...", "optax.sgd(0.1), 2")
    trains(made(inner=expression()(code)))


def method(code):
    trains(made(method=expression()(code.replace(PLACE, "diloco").replace("...", "period=2"))))


def outer(code):
    found = expression(outer=lc.outer.average())(code)
    trains(made(method=lc.methods.diloco(2, outer=found)))


def mesh(code):
    given = lc.make_mesh(region=2, devices=jax.devices()[:2])
    assert expression()(code).shape["region"] == given.shape["region"] == 2


def finished(code):
    one = made()
    state, _ = one.step(one.init(PARAMS), X[0])
    expression(engine=one, state=state)(code)


def started(code):
    one = made()
    one.step(expression(engine=one, params=PARAMS)(code), X[0])


def reconnected(code):
    one = made()
    expression(engine=one, state=one.init(PARAMS))(code)


def between_jobs(code):
    bound = inspect.signature(getattr(exchange, code.split(".")[1].partition("(")[0]))
    assert {"url", "region", "count", "run_id"} <= bound.parameters.keys()


def batch_policy(code):
    """One with which an `AdaptiveEngine` takes a method of several trainers."""
    policy = expression(batching=lc.batching, b=2)(code)
    trainers = lc.methods.adloco(2, 2).trainers
    method = dataclasses.replace(lc.methods.diloco(2), trainers=trainers, inner_batching=policy)
    lc.AdaptiveEngine(
        loss_fn, optax.sgd(0.1), method, 1, mesh=lc.make_mesh(devices=jax.devices()[:1])
    )


def by_rounds(code):
    (name,) = re.findall(r", (\w+)=", code)
    assert name in inspect.signature(lc.Engine.run).parameters


def array(code):
    x = np.ones(1)
    with jax.enable_x64(True):
        assert expression(x=jnp.asarray(x), value=1.0)(code).dtype in (jnp.float32, jnp.float64)


def section_of_a_model(code):
    bound = {"model_section": model_section}
    assert eval(code.replace(PLACE, "'own_models:pairs'"), bound).name == "own_models:pairs"


def config_of_a_method(code):
    text = code.replace(PLACE, "'diloco'", 1).replace(PLACE, "{'period': 7}")
    assert eval(text, {"base": base}).method.period == 7


def of_a_target(code):
    assert callable(getattr(Target, code.split(".")[1].partition("(")[0]))


EXECUTED = {
    SPLIT: nnx_dropout,
    MERGE: nnx_dropout,
    CALLED: nnx_dropout,
    "params, static = eqx.partition(model, eqx.is_array)": equinox_module,
    "loss_fn(params, batch, rng)": signature,
    f"update({PLACE}, state, params=None, {PLACE}**extra)": update,
    "update(delta, state, params=None, **extra)": update,
    UPDATE: merged,
    "weigh(self, norm_R, state, weight_R, kind)": weighed,
    "Engine(accumulate=)": parameter(lc.Engine),
    "Engine(accumulate=k)": parameter(lc.Engine),
    f"Engine(block={PLACE})": parameter(lc.Engine),
    "optax.adamw(1e-3)": inner,
    f"optax.{PLACE}(...).gradient_transformation()": multi_steps,
    f"lc.methods.{PLACE}(...)": method,
    "optax.chain(lowcomm_jax.compression.integrate(), outer)": outer,
    "lc.make_mesh(region=2)": mesh,
    "engine.init(params)": started,
    "engine.finish(state)": finished,
    "engine.reconnect(state)": reconnected,
    "engine.run(state, batches, rounds=...)": by_rounds,
    "exchange.store(...)": between_jobs,
    "batching.Fixed(b)": batch_policy,
    "jnp.asarray(value)": array,
    "x.astype(jnp.float32)": array,
    "target.mesh(...)": of_a_target,
    f"model_section({PLACE})": section_of_a_model,
    f"base({PLACE}, **{PLACE})": config_of_a_method,
}


def test_every_line_of_code_in_a_message_is_executed_here():
    """Where this fails, a message has another line: add how it is executed, or correct it."""
    assert advice() == EXECUTED.keys()


@pytest.mark.parametrize("code", EXECUTED)
def test_it_runs(code):
    EXECUTED[code](code)


# -- overrides of configs --------------------------------------------------------------------------

OVERRIDE = re.compile(rf"--config\.([a-z_]\w*(?:\.\w+)*)(?![\w.{PLACE}])(?:=([^\s,;:)'\"]+))?")
CONFIGS = (
    "diloco",
    "adloco",
    "configs/compare/quick.py",
    "configs/plan/llama_7b.py",
)


def overrides():
    """(field, value) of every override in a message; "" = it names the field alone."""
    found = {pair for text in messages() for pair in OVERRIDE.findall(text)}
    return sorted((field, "" if PLACE in value else value) for field, value in found)


@pytest.mark.parametrize("field, value", dict.fromkeys(overrides()))
def test_an_override_sets_a_field_that_there_is(field, value):
    value = {"N": "8"}.get(value, value)
    problems = []
    for path in CONFIGS:
        config, _ = load_config(path, [])
        if value == "" and field in fields(config):
            return
        problems.append(load_config(path, [(field, value)])[1])
        if value and problems[-1] == []:
            return
    raise AssertionError(problems)
