"""Strict JAX settings for every test, eight virtual CPU devices, programs compiled once."""

import atexit
import contextlib
import gc
import os
import shutil
import tempfile
import threading

from rounding import same_rounding

# Plug-ins for absent accelerators may be installed (extra `aot`): they are not to be started here.
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
os.environ.setdefault("XLA_FLAGS", "")
ON_CPU = os.environ["JAX_PLATFORMS"].split(",")[0] == "cpu"
if ON_CPU:
    os.environ["XLA_FLAGS"] += (
        " --xla_force_host_platform_device_count=8"
        # Tests compile many small programs once each: compile time is what matters.
        f" {same_rounding()}"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
else:  # JAX_PLATFORMS=cuda: all processes of a run share the card, and products are float32's
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

# Many tests build the same program. All processes of a run, which inherit these variables, share
# what one of them has compiled; who sets the folder keeps it, otherwise it goes at the end.
COMPILED = "JAX_COMPILATION_CACHE_DIR"
if COMPILED not in os.environ:
    os.environ[COMPILED] = tempfile.mkdtemp(prefix="lowcomm_jax_compiled_")
    atexit.register(shutil.rmtree, os.environ[COMPILED], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

import jax  # noqa: E402  (it reads the environment)
import pytest  # noqa: E402
from _pytest.doctest import DoctestModule  # noqa: E402
from contract import is_contract  # noqa: E402
from jax._src import xla_bridge  # noqa: E402
from jax._src.dispatch import JAXPR_TO_MLIR_MODULE_EVENT  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from slow_variants import is_slow  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config):
    """Before XLA reads its flags: the quick set spares a third of its processor time at level 0.

    There a product and a sum are not contracted as they are at higher levels. Tests that compare
    programs of different form bit for bit are slow ones for that reason.
    """
    # Else the flag would be for child processes alone, whose results then differ from those here.
    assert not xla_bridge.backends_are_initialized(), "a conftest.py has asked for a device"
    if not ON_CPU:
        return
    level = 0 if "not slow" in config.option.markexpr else 1
    os.environ["XLA_FLAGS"] += f" --xla_backend_optimization_level={level}"
    if level:
        # XLA's CPU backend has a thread a device, and needs more where a device waits in several
        # collectives: slow tests of 1F1B with shards inside a stage would wait for ever.
        os.environ.setdefault("NPROC", "16")


# Rooms whose tests run what users run: losses and Optax optimizers, which promote dtypes.
USERS = {"adloco", "channels", "checkpoint", "engine", "experiments", "learning", "mesh"}
USERS |= {"loops", "network", "optimizers", "params", "state", "sync", "train"}


@pytest.fixture(autouse=True, scope="module")
def promotion(request):
    """Of dtypes: users' in their rooms, but in plans, and strict in all others."""
    room, *within = request.path.relative_to(os.path.dirname(__file__)).parts
    promotes = room in USERS and within[0] != "plan"
    with jax.numpy_dtype_promotion("standard") if promotes else contextlib.nullcontext():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Doctests are the package's: nothing of `tests` is imported and searched for more."""
    return [one for one in (yield) if not isinstance(one, DoctestModule)]


def pytest_collection_finish(session):
    """What was imported stays: garbage is looked for among newer objects, and less often."""
    del session
    gc.freeze()
    gc.set_threshold(50_000)


# JAX 0.10 makes a context for each program, later ones for at most eleven of a thread.
make_ir_context = getattr(mlir, "_create_ir_context", mlir.make_ir_context)
_of_thread = threading.local()


def context_of_thread():
    """The MLIR context of all programs that a thread lowers in one file of tests.

    One takes 1.2 MB and most of the time of a small program: with JAX 0.10.2 to lower
    ``lambda x: i * x + 1.5`` takes 10 ms, 16 ms beside 500 others, and 3 ms in a shared one.
    """
    shared = _of_thread  # threads that outlive their file keep what was theirs
    if not hasattr(shared, "context"):
        shared.context = make_ir_context()
    return shared.context


mlir.make_ir_context = context_of_thread
HELD = 2000  # programs; where JAX forgets them, what files of tests share is traced anew
_lowered = 0


def _count(event, seconds, **_):
    global _lowered
    _lowered += event == JAXPR_TO_MLIR_MODULE_EVENT


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture(autouse=True, scope="module")
def caches():
    """Contexts are those of one file of tests; programs are forgotten once there are many."""
    global _of_thread, _lowered
    yield
    _of_thread = threading.local()
    if _lowered > HELD:
        _lowered = 0
        jax.clear_caches()


SLOW_S = 1800  # for one slow test; that of the others is in pyproject.toml


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before pytest chooses by marks."""
    contract = {path for path in {item.path for item in items} if is_contract(path)}
    for item in items:
        if item.path in contract:
            item.add_marker(pytest.mark.contract)
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
