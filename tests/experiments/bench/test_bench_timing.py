"""What the benchmarks have in common."""

from experiments import progress
from experiments.bench.work import interleave


def test_rounds_are_interleaved_and_told(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
    calls = []
    variants = {"one": lambda: calls.append("one"), "two": lambda: calls.append("two")}
    seconds = interleave(variants, repeats=2)
    assert calls == ["one", "two"] * 3 and {k: len(v) for k, v in seconds.items()} == {
        "one": 2,
        "two": 2,
    }
    told = capsys.readouterr()
    assert told.err.splitlines()[-1].startswith("timed: 5/6  ") and not told.out
