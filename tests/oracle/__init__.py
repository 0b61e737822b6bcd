# ruff: noqa: F401  (names are imported for users of the room)
"""An independent NumPy re-derivation of every training loop, to test the engine against.

Nothing here imports JAX or the package under test (jax_problem.py aside, which is not imported
from here).
"""

from oracle.async_server import (
    active_at,
    local_steps,
    run_arrivals,
    run_async_local_sgd,
    run_heloco,
)
from oracle.blocking import run_ddp, run_diloco, run_local_sgd, run_snoo
from oracle.channels import Exchange, run_channels
from oracle.compressed import (
    run_decoupled,
    run_decoupled_as_coded,
    run_muloco,
    run_pulseloco,
    run_sparseloco,
)
from oracle.decoupled import run_decoupled_diloco
from oracle.decoupled_jobs import run_learner_jobs
from oracle.demo import run_demo
from oracle.dilocox import Adaptation, int4_rows, run_dilocox
from oracle.edit import run_edit
from oracle.gossip import run_gasloc, run_noloco
from oracle.halos import run_halos
from oracle.inner import AdamW, Adopt, Momentum, Sgd
from oracle.loop import Event, Snapshot, Trajectory
from oracle.one_period import run_dilocox_dense, run_eager
from oracle.outer import Average, DelayedNesterovServer, HeavyBall, Nesterov, Restarting
from oracle.overlap import run_cocodc, run_streaming
from oracle.partial import merged_experts, run_partial_updates
from oracle.problem import (
    SHAPES,
    SIZE,
    Tree,
    flatten,
    gradient,
    loss,
    make_batches,
    make_params,
    step_batch,
    unflatten,
)
from oracle.rules import (
    blend_landing,
    change_rate,
    choose_fragment,
    first_send,
    staggered_sends,
    syncs_per_period,
    taylor_landing,
)
from oracle.trainers import make_stream, norm_test, run_trainers
