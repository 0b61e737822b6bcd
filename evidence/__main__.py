"""Pages of evidence, the runs behind them, figures of papers beside ours.

python -m evidence [campaign | published] [FLAGS]
"""

from __future__ import annotations

import sys

from experiments.__main__ import answered


def main(argv: list[str]) -> int:
    """Write or check the pages; with `campaign` first, train; with `published`, compare figures."""
    if argv[:1] == ["campaign"]:
        from evidence.campaign import run

        return answered("campaign", lambda: run.main(argv[1:]))
    if argv[:1] == ["published"]:
        from evidence.published import show

        return answered("published", lambda: show.main(argv[1:]))
    from evidence.results import write

    return answered("evidence", lambda: write.main(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
