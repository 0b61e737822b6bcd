"""Our parts of pages written by hand: made from records, or refused."""

import dataclasses
import json

import pytest
from campaign_cases import checked, config, jitter, ledger_of

from evidence.campaign.config import claim
from evidence.campaign.config import variant as variant_of
from evidence.results.blocks import refreshed
from evidence.results.gathered import gather
from experiments.cli import RefusedError

BEGIN, END = "<!-- comparison: records/one.json -->\n", "<!-- end of comparison -->"


def variant(loss, sent):
    return {
        "loss": {"mean": loss, "half": None, "count": 1},
        "document_interval": 0.05,
        "tokens": 2048,
        "bytes_sent": sent,
        "compression": 8e6 / sent,
        "networks": {"wan": {"seconds": 2.5, "utilisation": 0.8, "speedup": 4.0}},
        "staleness": 0,
    }


def result():
    return {
        "version": 2,
        "seeds": [0],
        "baseline": "ddp",
        "networks": ["wan"],
        "variants": {"diloco": variant(2.25, 4e5), "ddp": variant(2.0, 8e6)},
        "panels": [{"differences": {"ddp": {}, "diloco": {}}}],
        "step_seconds": 0.02,
        "failures": [],
        "at_equal": [
            {"of": "bytes", "network": None, "budget": 4e5, "losses": {"ddp": 3.0, "diloco": 2.25}}
        ],
    }


@pytest.fixture
def docs(tmp_path, monkeypatch):
    """A page with an old table, a page without any, and the record."""
    monkeypatch.chdir(tmp_path)
    for folder in ("records", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "records/one.json").write_text(json.dumps(result()))
    page = f"# Results\n\nBefore.\n\n{BEGIN}| an old | table |\n{END}\n\nAfter.\n"
    (tmp_path / "docs/RESULTS.md").write_text(page)
    (tmp_path / "docs/other.md").write_text("# Other\n")
    return tmp_path / "docs"


def test_what_stands_between_the_lines_is_what_the_record_holds(docs):
    [(page, text)] = refreshed(docs).items()
    assert page == docs / "RESULTS.md"
    before, table = text.split(BEGIN)
    table, after = table.split(END)
    assert before == "# Results\n\nBefore.\n\n" and after == "\n\nAfter.\n"
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines() if "|" in row
    ]
    assert rows[0][:2] == ["variant", "eval loss"] and rows[0][-1] == "staleness"
    assert [row[0] for row in rows[2:]] == ["ddp", "diloco"]  # in the order of the panels
    assert rows[3][1:] == ["2.250±0.050", "2.05k", "400 kB", "20x", "2.5 s", "80%", "4x", "0"]
    assert "At equal bytes (400 kB a region) diloco has the lowest loss, 2.250" in table
    page.write_text(text)
    assert refreshed(docs) == {page: text}


def test_a_comparison_without_its_end_is_refused(docs):
    page = docs / "RESULTS.md"
    whole = page.read_text()
    for text in (whole.replace(END, ""), f"{BEGIN}{whole}", f"{whole}{END}"):
        page.write_text(text)
        with pytest.raises(RefusedError, match=r"RESULTS\.md: each `<!--"):
            refreshed(docs)


def test_failures_of_a_comparison_are_told(docs):
    failed = {"failures": [{"variant": "diloco", "seed": 1, "error": "it diverged"}]}
    (docs.parent / "records/one.json").write_text(json.dumps(result() | failed))
    assert "Failed: diloco, seed 1: it diverged." in refreshed(docs)[docs / "RESULTS.md"]


def test_records_that_are_missing_or_of_another_version_are_named(docs):
    record = docs.parent / "records/one.json"
    for text in ("{", "[]", "{}"):
        record.write_text(text)
        with pytest.raises(RefusedError, match=r"one\.json is no compare\.json"):
            refreshed(docs)
    record.write_text(json.dumps(result() | {"version": 1}))
    with pytest.raises(RefusedError, match="version 1"):
        refreshed(docs)
    record.unlink()
    with pytest.raises(RefusedError, match=r"no records/one\.json"):
        refreshed(docs)


def test_the_claims_of_papers_have_a_row_each(tmp_path):
    """Worst first, with the largest scale, the other texts, and where to read on."""
    arms = dict(config(tmp_path).arms) | {"heavy": variant_of("diloco", method={"period": 1})}
    claims = dict(config(tmp_path).claims) | {
        "setting": claim("A setting", "0000.00003", "heavy", "diloco", 0.0, "a gap"),
        "better": claim("It is better", "0000.00002", "diloco", "averaging", 0.0, "", again="a.py"),
    }
    campaign = checked(tmp_path, arms=arms, claims=claims)
    losses = {"diloco": 2.01, "heavy": 1.9}
    made = gather(ledger_of(campaign, lambda c: losses.get(c.arm, 2.0) * (1 + jitter(c) / 10)))
    docs = tmp_path / "docs"
    docs.mkdir()
    before = "Before.\n<!-- claims -->\nof before\n<!-- end of claims -->\nAfter."
    (docs / "RESULTS.md").write_text(before)
    [text] = refreshed(docs, (made, dataclasses.replace(made, verdicts=()))).values()
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" (")[0] for row in rows] == ["| It is better", "| DiLoCo is as good"]
    assert rows[0].split(" | ")[1:] == [
        "**contradicted (up to 0.001M, 8 rounds)**",
        "+0.5 ± 0.0 % at 0.001M, 8 rounds, 2 regions",
        "-",
        "-",
        "[better](../evidence/pages/campaign.md#better), `a.py` |",
    ]
    assert "1 claims on settings of a method: 1 holds." in text and "of before" not in text
    assert text.startswith("Before.\n<!-- claims -->\n| claim") and text.endswith("After.")
