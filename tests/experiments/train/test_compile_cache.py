"""The folder of compiled programs: a second start finds what the first one compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from params.tiny_runs import X, engine, train

import lowcomm_jax as lc
from experiments.train import compile_cache

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def noisy_loss(params, batch, rng):
    return params["w"] * (jax.random.uniform(rng) + batch["x"].mean())


@pytest.fixture
def restored():
    """The settings of JAX are those from before at the end."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    compilation_cache.reset_cache()
    yield before
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def counts(run):
    """How many programs were found in the folder while `run` ran ("hits"), and not ("misses")."""
    found = {"hits": 0, "misses": 0}

    def count(event, **_):
        kind = event.removeprefix("/jax/compilation_cache/cache_")
        if kind in found:
            found[kind] += 1

    jax.monitoring.register_event_listener(count)
    try:
        jax.block_until_ready(run())
    finally:
        jax.monitoring.unregister_event_listener(count)
    return found


def test_what_was_compiled_is_found_by_another_start(tmp_path, restored):
    x = np.arange(3, dtype=np.float32)  # compiles nothing, so that the folder is still open

    def start():
        return jax.jit(lambda x: jnp.cos(x) * 3)(x)

    compile_cache.enable(str(tmp_path / "new" / "folder"))
    jax.config.update(SETTINGS[1], 0.0)  # so short a program is not kept otherwise
    assert counts(start)["hits"] == 0
    assert list((tmp_path / "new" / "folder").iterdir())
    assert counts(start)["hits"] == 1


@pytest.mark.parametrize("method", [lc.methods.diloco(2), lc.methods.ddp()])
def test_a_run_with_another_seed_compiles_nothing(tmp_path, restored, method):
    """Three seeds of a comparison compile once, if none of their programs knows the seed."""
    compile_cache.enable(str(tmp_path / "folder"))

    def start(seed):
        jax.clear_caches()
        one = engine(noisy_loss, method, seed=seed)
        return train(one, {"w": np.float32(1.0)}, X[:2]).anchor

    assert counts(lambda: start(0))["misses"] > 0
    again = counts(lambda: start(1))
    assert again["misses"] == 0 < again["hits"]


def test_the_default_is_the_users_cache_folder_and_off_changes_nothing(
    tmp_path, monkeypatch, restored
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_cache.enable("off")
    assert {name: getattr(jax.config, name) for name in SETTINGS} == restored
    compile_cache.enable(None)
    folder = compile_cache.default_folder()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.is_dir() and folder.is_relative_to(tmp_path / "lowcomm_jax" / "xla")


@pytest.mark.parametrize("given", [None, "/dev/null/programs"])
def test_a_folder_that_cannot_be_written_is_one_line(given, monkeypatch, restored, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    compile_cache.enable(given)
    assert {name: getattr(jax.config, name) for name in SETTINGS} == restored
    (line,) = caplog.messages
    assert "compiled programs are not kept in /dev/null" in line and "--compile_cache" in line
