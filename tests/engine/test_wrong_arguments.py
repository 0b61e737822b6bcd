"""What is not what its name says gets one line with the fix, not a traceback of the inside."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.train import inner_step


def loss_fn(params, batch, rng):
    del rng
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def engine(loss=loss_fn, inner=None, method=None):
    return lc.Engine(loss, inner or optax.sgd(0.1), method or lc.methods.diloco(3), 2)


PARAMS = {"w": np.ones(3, np.float32)}


def test_all_arguments_of_another_type_are_listed():
    with pytest.raises(ValueError) as error:
        engine(loss=3, inner="adam", method="dilocco")
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert "loss_fn=3: give a function" in lines[1]
    assert "inner='adam': give an Optax optimizer" in lines[2]
    assert "method='dilocco': no Method; call its factory, as lc.methods.diloco(...)" in lines[3]


@pytest.mark.parametrize("method", [lc.methods.adloco, "adloco"])
@pytest.mark.parametrize("kind", [lc.Engine, lc.AdaptiveEngine])
def test_a_factory_that_was_not_called_is_named(kind, method):
    with pytest.raises(ValueError, match=r"call its factory, as lc.methods.adloco\(...\)") as error:
        kind(loss_fn, optax.sgd(0.1), method, 2)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    "batch, shown",
    [
        ({"x": np.ones((4, 3))}, r"\['x'\] \[4, 3\]"),
        ({"x": np.ones((2, 4, 3)), "n": np.ones(2)}, r"\['n'\] \[2\], \['x'\] \[2, 4, 3\]"),
        ([1.0], r"\[0\] \[\]"),
        ({}, "no leaf"),
    ],
)
def test_a_batch_of_another_shape_is_shown(batch, shown):
    one = engine()
    expected = rf"\[2 regions, per-region batch, ...\]; this one has {shown}"
    with pytest.raises(ValueError, match=expected):
        one.step(one.init(PARAMS), batch)
    with pytest.raises(ValueError, match=expected):
        one.run(one.init(PARAMS), [batch])


@pytest.mark.parametrize("entries", [np.full((2, 4, 3), "a"), np.full((2, 4, 3), None)])
def test_a_batch_of_text_or_objects(entries):
    one = engine()
    with pytest.raises(ValueError, match=r"arrays of numbers; \['x'\] has dtype"):
        one.step(one.init(PARAMS), {"x": entries})


def test_a_run_takes_batches_of_other_shapes_and_dtypes_as_steps_do():
    """Blocks of one shape and dtype; others were reshaped or cut to whole numbers, or failed."""
    values = np.linspace(-1, 2, 48, dtype=np.float32).reshape(2, 8, 3)
    stream = [values.round().astype(np.int32), values, values[:, :4], values.reshape(2, 4, 2, 3)]
    one = engine()
    stepped, losses = one.init(PARAMS), []
    for x in stream:
        stepped, metrics = one.step(stepped, {"x": x})
        losses.append(np.asarray(metrics["loss"]))
    ran, history = one.run(one.init(PARAMS), [{"x": x} for x in stream])
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-6)
    got, expected = lc.region_params(ran)["w"], lc.region_params(stepped)["w"]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_mesh_and_seed_of_another_type_are_listed():
    with pytest.raises(ValueError) as error:
        lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(3), 2, mesh="cpu", seed="a")
    assert "mesh='cpu': no Mesh; give one of lc.make_mesh" in str(error.value)
    assert "seed='a': give a whole number" in str(error.value)


@pytest.mark.parametrize("roles", [3, {"w": 1}, ["train", None, 2.5]])
def test_roles_that_are_none(roles):
    with pytest.raises(
        ValueError, match=r"roles=.*give a function of \(name, leaf\), or a tree of"
    ):
        lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(3), 2, roles=roles)


def test_settings_that_are_missing_are_told_with_what_they_take():
    with pytest.raises(ValueError) as error:
        lc.Engine(loss_fn, block=0)
    for line in (
        "inner=None: give an Optax optimizer",
        "method=None: no Method; call its factory",
        "regions=None: give a whole number",
        "block=0",
    ):
        assert line in str(error.value), line
    with pytest.raises(TypeError, match="multiple values for argument 'inner'"):
        lc.Engine(loss_fn, optax.sgd(0.1), inner=optax.sgd(0.1))


def test_a_schedule_of_learning_rates_that_is_no_function():
    method = lc.methods.adloco(4)
    with pytest.raises(ValueError, match="schedule=3: give a function, or None"):
        lc.AdaptiveEngine(loss_fn, optax.sgd(0.1), method, 2, schedule=3)


@pytest.mark.parametrize("roles", ["train", {"v": "train"}])
def test_roles_of_another_tree(roles):
    one = lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(3), 2, roles=roles)
    with pytest.raises(ValueError, match=r"roles: give a function of \(name, leaf\), or a tree"):
        one.init(PARAMS)


@pytest.mark.parametrize("view", [lc.global_params, lc.region_params])
def test_parameters_of_what_is_no_state(view):
    with pytest.raises(ValueError, match="a tuple is no training state"):
        view((PARAMS, None))


@pytest.mark.parametrize("array", [np.ones, jnp.ones])
def test_run_takes_a_stream(array):
    """Of an array `[2, 2, ...]` each row would be a batch."""
    one = engine()
    for batch in ({"x": array((2, 2, 3), np.float32)}, array((2, 2, 3), np.float32)):
        with pytest.raises(ValueError, match="a stream of batches, not one"):
            one.run(one.init(PARAMS), batch)


def test_leaves_that_are_no_arrays_are_named_together():
    with pytest.raises(ValueError) as error:
        engine().init({**PARAMS, "act": jnp.tanh, "b": 0.5, "kind": "relu"})
    assert "'act': a PjitFunction is no array: keep it out" in str(error.value)
    assert "'b': a float is no array: make it one" in str(error.value)
    assert "'kind': a str is no array" in str(error.value)


@pytest.mark.parametrize(
    "gives,line",
    [
        (lambda loss: (loss, {"a": jnp.ones(8)}), r"aux\['a'\] has the shape \[8\]: mean it, or"),
        (lambda loss: (loss, {"a": "x"}), r"aux\['a'\] is a str: give a scalar, or leave it out"),
        (lambda loss: (loss, {"a": 2**33}), r"aux\['a'\] is a int: give a scalar, or leave it out"),
        (lambda loss: (loss, {"updates": None}), r"aux\['updates'\] is a NoneType: give a dict"),
        (lambda loss: 3, "a loss of dtype int32: give a floating-point one"),
        (lambda loss: jnp.full(4, loss), r"a loss of shape \[4\]: give a scalar"),
        (lambda loss: (loss, {"a": None}), r"aux\['a'\] is a NoneType: give a scalar"),
        (lambda loss: (loss, None), r"aux is a NoneType: return a scalar loss, or \(loss, dict"),
        (lambda loss: (loss, jnp.ones(2)), r"aux is an array: return a scalar loss"),
        (lambda loss: (loss, {}, {}), r"a tuple of 3: return a scalar loss"),
        (lambda loss: [loss, {}], r"a list as its loss: return a scalar loss"),
        (lambda loss: {"loss": loss}, r"a dict as its loss: return a scalar loss"),
        (lambda loss: None, r"a NoneType as its loss: return a scalar loss"),
    ],
)
def test_what_a_loss_function_may_not_return(gives, line):
    one = engine(loss=lambda params, batch, rng: gives((batch["x"] @ params["w"]).mean()))
    with pytest.raises(ValueError, match=line):
        one.step(one.init(PARAMS), {"x": np.ones((2, 4, 3), np.float32)})


@pytest.mark.parametrize("aux", [{"a": 1, "b": 2.0, "c": np.float32(3)}, [("a", 1)], ()])
def test_aux_of_numbers_and_pairs(aux):
    one = engine(loss=lambda params, batch, rng: ((batch["x"] @ params["w"]).mean(), aux))
    _, metrics = one.step(one.init(PARAMS), {"x": np.ones((2, 4, 3), np.float32)})
    for name, value in dict(aux).items():
        assert np.asarray(metrics[name]).tolist() == [value, value]


def test_a_state_that_is_none():
    with pytest.raises(ValueError, match="state is a dict, no TrainState: start with engine"):
        engine().step(PARAMS, {"x": np.ones((2, 4, 3), np.float32)})


def test_a_state_that_was_donated_is_refused(tmp_path):
    one, batch = engine(), {"x": np.ones((2, 4, 3), np.float32)}
    old = one.init(PARAMS)
    one.step(old, batch)
    checkpoints = Checkpoints(tmp_path)
    for again in (
        lambda: lc.global_params(old),
        lambda: lc.region_params(old),
        lambda: checkpoints.save(old, extra={}, config={}),
        lambda: one.step(old, batch),
        lambda: one.run(old, [batch]),
        lambda: one.warm(old, batch),
        lambda: one.finish(old),
    ):
        with pytest.raises(ValueError, match=r"was donated.*use the state that was returned"):
            again()
    ended = one.init(PARAMS)
    one.finish(ended)
    with pytest.raises(ValueError, match="was donated"):
        one.finish(ended)


def test_a_mask_of_another_length_leaves_the_state():
    one, batch = engine(), {"x": np.ones((2, 4, 3), np.float32)}
    state = one.init(PARAMS)
    for mask in ([True], lambda step: [True]):
        with pytest.raises(ValueError, match="participants"):
            one.run(state, [batch], mask) if callable(mask) else one.step(state, batch, mask)
    state, _ = one.step(state, batch, [True, False])
    assert state.counters.step == 1


def test_trainers_that_were_donated_are_refused():
    policy = lc.batching.NormTest(start=2, cap=4, microbatches=2)
    method = lc.methods.adloco(2, 2, 1, inner_batching=policy)
    one = lc.AdaptiveEngine(loss_fn, optax.sgd(0.1), method, 2, mesh=lc.make_mesh())
    state = one.init(PARAMS)
    state.trainers[1].state.inner.step.delete()
    for call in (
        lambda: one.run(state, lambda *_: None, steps=1),
        lambda: one.finish(state),
        lambda: lc.global_params(state),
    ):
        with pytest.raises(ValueError, match=r"was donated.*use the state that was returned"):
            call()


@pytest.mark.parametrize("seed", [True, 1.5, None])
def test_a_seed_that_is_no_whole_number(seed):
    with pytest.raises(ValueError, match=f"seed={seed}: give a whole number"):
        lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(3), 2, seed=seed)
    lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(3), np.int64(2), seed=np.int64(1))


def test_an_object_of_multisteps_is_told_how_it_becomes_a_transform():
    with pytest.raises(ValueError, match=r"optax.MultiSteps\(...\).gradient_transformation\(\)"):
        engine(inner=optax.MultiSteps(optax.sgd(0.1), 2))
    inner = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    assert engine(inner=inner).init(PARAMS)


def gathering(kind, k):
    if kind == "MultiSteps":
        return optax.MultiSteps(optax.adamw(0.1), k).gradient_transformation()
    if kind == "apply_every":
        return optax.chain(optax.apply_every(k), optax.sgd(0.1))
    clipped = optax.chain(optax.clip_by_global_norm(1.0), gathering("MultiSteps", k))
    return optax.partition({"w": clipped}, {"w": "w"})


@pytest.mark.parametrize("kind", ["MultiSteps", "apply_every", "inside others"])
def test_a_period_that_ends_between_moves_of_the_optimizer_gets_a_warning(kind, caplog):
    for k, period in ((2, 3), (4, 3), (4, 6)):
        caplog.clear()
        engine(inner=gathering(kind, k), method=lc.methods.diloco(period)).init(PARAMS)
        [line] = [r.getMessage() for r in caplog.records]
        assert line.startswith(f"period={period} counts steps, and the inner optimizer gathers")
        assert "multiple of the optimizer's k, or Engine(accumulate=k)" in line


def test_optimizers_that_read_their_leaves_are_taken():
    """Of which a largest entry must exist."""
    largest = optax.stateless(lambda u, _: jax.tree.map(lambda x: x / jnp.max(jnp.abs(x)), u))
    for inner in (largest, optax.MultiSteps(largest, 2).gradient_transformation()):
        assert engine(inner=inner).init(PARAMS)


def test_an_optimizer_that_raises_does_so_before_any_step():
    def update(updates, state, params=None):
        raise ValueError("no leaf is a matrix")

    broken = optax.GradientTransformation(lambda params: (), update)
    for method in (lc.methods.diloco(2), lc.methods.ddp()):
        with pytest.raises(ValueError, match="no leaf is a matrix"):
            engine(inner=broken, method=method).init(PARAMS)


def test_a_period_that_ends_with_a_move_of_the_optimizer_gets_none(caplog):
    for k, period in ((1, 3), (3, 3), (2, 4)):
        method = lc.methods.diloco(period)
        engine(inner=gathering("MultiSteps", k), method=method).init(PARAMS)
    engine(inner=gathering("MultiSteps", 2), method=lc.methods.ddp()).init(PARAMS)
    assert not caplog.records


def test_dicts_with_keys_of_several_types_are_named():
    mixed = {"w": np.ones(3, np.float32), "d": [{1: np.ones(2, np.float32), "a": np.ones(2)}]}
    expected = r"a dict has the keys \[1, 'a'\], which cannot be sorted: use str only"
    with pytest.raises(ValueError, match=expected) as error:
        engine().init(mixed)
    assert len(str(error.value).splitlines()) == 2
    one = lc.Engine(loss_fn, optax.sgd(0.1), lc.methods.diloco(3), 2, roles={1: 2, "w": "train"})
    with pytest.raises(ValueError, match=r"the keys \[1, 'w'\], which cannot be sorted"):
        one.init(PARAMS)


def test_keys_that_jax_can_flatten_are_taken():
    ordered = collections.OrderedDict({1: np.ones(2, np.float32), "a": np.ones(2, np.float32)})
    numbered = {1: np.ones(2, np.float32), 0: np.ones(2, np.float32)}
    assert engine().init({"w": ordered, "d": numbered})


@pytest.mark.parametrize("method", [lc.methods.diloco(3), lc.methods.ddp()])
@pytest.mark.parametrize(
    "inner",
    [
        optax.multi_transform({"a": optax.sgd(0.1)}, {"w": "a"}),
        optax.chain(optax.masked(optax.trace(0.3), {"w": True}), optax.sgd(0.1)),
        optax.multi_transform({"a": optax.sgd(0.1)}, {"w": "a", "t": "a", "more": "a"}),
        optax.multi_transform({"a": optax.sgd(0.1)}, ["a", "a"]),
    ],
    ids=["labels", "mask", "too many", "another tree"],
)
def test_labels_and_masks_without_the_frozen_leaves(method, inner):
    with pytest.raises(ValueError, match="they need an entry for every leaf, frozen ones, too"):
        engine(inner=inner, method=method).init({**PARAMS, "t": np.arange(4)})


def test_an_error_of_the_optimizers_own_stays_as_it_is():
    def init(params):
        raise ValueError("this optimizer needs a matrix: shape mismatch")

    inner = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    with pytest.raises(ValueError, match="this optimizer needs a matrix") as error:
        engine(inner=inner).init(PARAMS)
    assert "labels" not in str(error.value)


@pytest.mark.parametrize("call", ["step", "run", "finish"])
def test_calls_that_are_traced_say_that_they_compile_themselves(call):
    one = engine()
    state, batch = one.init(PARAMS), {"x": np.ones((2, 4, 3), np.float32)}
    given = {"step": (batch,), "run": ([batch],), "finish": ()}[call]
    with pytest.raises(ValueError, match=r"compile their own programs: call them outside jax\.jit"):
        jax.jit(getattr(one, call))(state, *given)
    assert one.step(state, batch)


BATCH = {"x": np.ones((2, 4, 3), np.float32)}
RESERVED = ("step", "events", "loss", "grad_norm", "skipped", "active", "away")


@pytest.mark.parametrize("method", [lambda: lc.methods.diloco(3), lc.methods.ddp])
def test_reserved_names_of_an_aux_are_refused_together(method):
    def loss(params, batch, rng):
        return loss_fn(params, batch, rng), {**dict.fromkeys(RESERVED, 42.0), "mine": 1.0}

    one = engine(loss, method=method())
    with pytest.raises(ValueError) as error:
        one.step(one.init(PARAMS), BATCH)
    (line,) = str(error.value).splitlines()
    named = ", ".join(map(repr, RESERVED))
    assert line.startswith(f"loss_fn's aux has {named}: ") and line.endswith("as 'my_step'")


def test_names_of_a_channels_metrics_are_reserved():
    def loss(params, batch, rng):
        return loss_fn(params, batch, rng), {"mu_spread": 1.0, "nu_left_out": 1.0}

    one = engine(loss, optax.contrib.adopt(0.1), lc.methods.des_loc(2, 2))
    with pytest.raises(ValueError, match=r"aux has 'mu_spread', 'nu_left_out': .*'my_mu_spread'"):
        one.step(one.init(PARAMS), BATCH)
    kept = engine(loss)  # free where no channel has the name
    _, metrics = kept.step(kept.init(PARAMS), BATCH)
    assert metrics["mu_spread"].tolist() == [1, 1]


def test_every_metric_of_every_method_is_reserved():
    """What a step reports beside the aux, and the keys of its row."""
    methods = lc.methods
    for method in (methods.diloco(2), methods.ddp(), methods.heloco(2, (1.0, 0.5))):
        one = engine(method=method)
        _, history = one.run(one.init(PARAMS), [BATCH] * 2)
        for row in history.rows():
            assert set(row) - {"tokens"} <= set(inner_step.RESERVED), method.name


@pytest.mark.parametrize("view", [lc.global_params, lc.region_params])
def test_parameters_inside_jit(view):
    state = engine().init(PARAMS)
    np.testing.assert_array_equal(jax.jit(view)(state)["w"], view(state)["w"])
