"""Settings that processes of this project run under."""

import pytest

from experiments import processes

PRINT = "import os\nprint(os.environ['OPENBLAS_NUM_THREADS'], os.environ['PJRT_NPROC'])\n"


@pytest.mark.parametrize("own", [None, "7"])
def test_blas_does_not_spin_and_transfers_have_a_thread(tmp_path, monkeypatch, own):
    (tmp_path / "printing.py").write_text(PRINT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if own is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", own)
    output = tmp_path / "output.txt"
    assert processes.start("printing", [], output).wait() == 0
    blas, threads = output.read_text().split()
    assert blas == (own or "1")
    assert int(threads) == max(2, processes.cores())
