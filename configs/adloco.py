"""AdLoCo (arXiv 2508.18182): trainers that merge, batches that grow with the gradients' noise.

    python -m experiments train --config=configs/adloco.py --workdir=runs/adloco

`steps`, evaluations and the learning rate's schedule count *nominal* steps, of regions x batch
sequences each: the run ends after as many tokens as any other of so many steps, however large the
steps themselves have become. Four trainers start with one sequence a step each, together one
nominal step.

`:published` has the published setting's numbers (MicroLlama 300M, H = 200, AdamW 2e-5, four
trainers from batch 1, a merge every two rounds) on a LLaMA of 150M. The published code computes the
augmented test differently, so its bounds of it (0.8, 0.01, 0.3) are not taken: here those of
`lowcomm_jax.rules.batching` stand. Not run by us.
"""

from ml_collections import ConfigDict

from experiments.config import base, published

OUTER = {"name": "sgd", "learning_rate": 0.5}
PUBLISHED = {"name": "augmented", "start": 1, "cap": 256}


def get_config(size: str = "nano") -> ConfigDict:
    """Give the config: `nano` for a laptop, or `published`."""
    if size == "published":
        config = published(
            base("adloco", period=200, outer=OUTER, inner_batching=PUBLISHED),
            model="llama_150m",
            regions=4,
            batch=16,
            steps=4000,
        )
        config.inner.learning_rate = 2e-5
        config.data.seq_len = 512
        config.adaptive.largest_microbatch = 16
        return config
    if size != "nano":
        raise ValueError(f"size {size!r} is unknown: use nano or published")
    batches = {"name": "norm", "start": 1, "cap": 32, "microbatches": 2}
    config = base("adloco", period=30, outer=OUTER, inner_batching=batches)
    # Every size of a microbatch is two programs to compile: here there is one, and batches of more
    # than two sequences are accumulated.
    config.adaptive.largest_microbatch = 1
    return config
