"""Continue runs in a process of their own: `python checkpoint_continue.py DIRECTORY NAME...`."""

import pickle
import sys
from pathlib import Path

from checkpoint.checkpoint_cases import HALF, bf16_params, make_engine, train, values

from lowcomm_jax.checkpoint import Checkpoints


def main(directory: Path, names: list[str]) -> None:
    for name in names:
        engine = make_engine(name)
        with Checkpoints(directory / name) as checkpoints:
            found = checkpoints.restore(engine, bf16_params(name), config={"method": name})
        restored = values(found.state)
        state = train(engine, found.state, range(HALF + 1, 2 * HALF + 1))
        result = (found.step, found.extra, restored, values(state))
        (directory / f"{name}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
