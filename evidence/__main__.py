"""The pages of evidence, or the runs behind them: `python -m evidence [campaign] [FLAGS]`."""

from __future__ import annotations

import sys

from experiments.__main__ import answered


def main(argv: list[str]) -> int:
    """Write or check the pages; with `campaign` first, train; returns the exit code."""
    if argv[:1] == ["campaign"]:
        from evidence.campaign import run

        return answered("campaign", lambda: run.main(argv[1:]))
    from evidence.results import write

    return answered("evidence", lambda: write.main(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
