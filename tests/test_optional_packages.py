"""What an installation without extras does not have is not imported before it is asked for."""

import subprocess
import sys

OPTIONAL = ["pyarrow", "datasets", "tensorboardX", "wandb", "prometheus_client"]


def test_imported_without_extras():
    absent = "".join(f"sys.modules[{optional!r}] = None; " for optional in OPTIONAL)
    code = f"import sys; {absent}import lowcomm_jax, experiments.__main__, experiments.train.job"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
