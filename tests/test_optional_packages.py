"""What an installation without extras does not have is not imported before it is asked for."""

import subprocess
import sys

OPTIONAL = ["pyarrow", "datasets", "tensorboardX", "wandb", "prometheus_client"]
# What needs least comes first, so that none works only by what another one has imported.
IMPORTED = ["experiments.__main__", "lowcomm_jax", "experiments.train.job"]


def test_imported_without_extras():
    absent = "".join(f"sys.modules[{optional!r}] = None; " for optional in OPTIONAL)
    code = f"import sys; {absent}import {', '.join(IMPORTED)}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
