"""Strict JAX settings for every test, and eight virtual CPU devices."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    # Tests compile many small programs once each: compile time is what matters.
    " --xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
