"""From made-up records to effects, verdicts and a page; and the page of this repository."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from campaign_cases import checked, config, jitter, ledger_of, record
from matplotlib.figure import Figure

from evidence.campaign.config import claim, stage, variant
from evidence.campaign.config import size as size_of
from evidence.campaign.ledger import read, write
from evidence.campaign.plan import Rung, plan
from evidence.results import fit as fits
from evidence.results import write as command
from evidence.results.corpora import AGREE, DIFFER, Judged, agreement, pairs, section
from evidence.results.effects import effects
from evidence.results.figures import digest_in, draw
from evidence.results.gathered import gather
from evidence.results.markdown import count, short
from evidence.results.page import page
from evidence.results.sections import told_trend
from evidence.results.verdict import Trend, verdicts, word_of
from experiments.cli import RefusedError, load_config

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ("equal", "better")
NOISE = {0: -0.02, 1: 0.03, 2: -0.01, 3: 0.0}  # by seed, shared by both arms


def gap(of):
    """Losses: DiLoCo `of(cell)` above the others' 2.0, and a noise that pairing takes away."""

    def loss(cell):
        base = 2.0 + NOISE[cell.seed]
        return base * (1 + of(cell)) if cell.arm == "diloco" else base

    return loss


def verdict(campaign, of):
    """Of one claim on one split."""
    [found] = verdicts(campaign, {of[0].claim: of})
    return found


def test_effects_by_hand(tmp_path):
    campaign = checked(tmp_path)
    ledger = ledger_of(campaign, gap(lambda c: 0.10 / c.rounds + jitter(c)))
    found = effects(ledger)
    first, second = found["equal"]
    assert (first.rung.rounds, second.rung.rounds) == (4, 8)
    assert first.differences == pytest.approx({0: 0.024, 1: 0.025, 2: 0.026})
    assert first.mean == pytest.approx(0.025) and second.mean == pytest.approx(0.0125)
    # All four rungs have s = 0.001, so has the pool, with 8 degrees of freedom: t(97.5 %) is
    # 2.306004.
    assert first.half == pytest.approx(2.306004 * 0.001 / math.sqrt(3), rel=1e-5)
    # t against the margin 0.01 is 0.015 / 0.00057735 = 25.98; two-sided, for 8 degrees of freedom,
    # p = 1 - x (1 + c / 2 + 3 c^2 / 8 + 15 c^3 / 48) with x = t / sqrt(8 + t^2), c = 1 - x^2.
    for effect, above in ((first, 0.015), (second, 0.0025)):
        t = above / (0.001 / math.sqrt(3))
        x = t / math.sqrt(8 + t * t)
        c = 1 - x * x
        p = 1 - x * (1 + c / 2 + 3 * c**2 / 8 + 15 * c**3 / 48)
        assert effect.p == pytest.approx(p, rel=1e-4)
    tested = [e for of in found.values() for e in of]
    # Holm: the smallest of four p-values counts four times, the next three times.
    small, next_ = sorted(tested, key=lambda e: e.p)[:2]
    assert small.adjusted == pytest.approx(4 * small.p)
    assert next_.adjusted == pytest.approx(max(3 * next_.p, small.adjusted))
    # Of three values Hedges' correction is 1 - 3 / 7.
    assert first.size_of_effect == pytest.approx(25.0 * 4 / 7)
    assert first.exchanges == first.bytes == first.seconds == 1 and first.fewer_bytes == 20
    assert first.status == "opposite" and {e.status for e in found["better"]} == {"opposite"}


def test_a_claim_about_another_measure_than_the_loss(tmp_path):
    claims = {
        "closer": claim("Closer", "0000.00004", "diloco", "ddp", 0.0, "", measure="anchor_variance")
    }
    campaign = checked(tmp_path, claims=claims)
    spread = {"diloco": 0.02, "ddp": 0.04, "averaging": 0.0}
    made = ledger_of(campaign, lambda c: 2.0 + NOISE[c.seed])
    for cell, one in made.found.items():
        value = spread[cell.arm]
        if cell.arm == "diloco" and not cell.tunes:
            value *= 1 + jitter(cell)
        made.found[cell] = {**one, "anchor_variance": value}
    first, second = effects(made)["closer"]
    assert first.mean == pytest.approx(-0.5) and first.values == pytest.approx((0.02, 0.04))
    assert first.status == second.status == "seen"
    assert first.at_equal_bytes == 0.0  # that column is of the loss
    # Nor does it stand among the losses: its scale is another one.
    assert command.pictures(gather(made))[command.OVERVIEW] == []
    one = next(c for c in made.found if c.arm == "ddp" and not c.tunes and c.rounds == 4)
    made.found[one] = {**made.found[one], "anchor_variance": None}  # as where it is not measured
    assert len(effects(made)["closer"][0].differences) == 2


@pytest.mark.parametrize(
    "of, equal, better",
    [
        (lambda c: -0.02, ("holds", 8), ("holds", 8)),
        (lambda c: -0.02 if c.rounds == 8 else 0.02, ("holds from", 8), ("holds from", 8)),
        (lambda c: 0.005, ("holds", 8), ("contradicted", 8)),
        (lambda c: 0.04, ("contradicted", 8), ("contradicted", 8)),
        (lambda c: 0.16 / c.rounds, ("not seen up to", 8), ("not seen up to", 8)),  # it shrinks
        (lambda c: 0.01 if c.seed else -0.02, ("not seen up to", 8), ("not seen up to", 8)),
        (lambda c: -0.02 if c.rounds == 4 else 0.02, ("not seen up to", 8), ("not seen up to", 8)),
    ],
)
def test_verdicts(tmp_path, of, equal, better):
    campaign = checked(tmp_path)
    found = effects(ledger_of(campaign, gap(lambda c: of(c) + jitter(c))))
    for name, (word, rounds) in {"equal": equal, "better": better}.items():
        told = verdict(campaign, found[name])
        assert (told.word, told.scale) == (word, ("small", rounds)), name


@pytest.mark.parametrize(
    "seen, expected",
    [
        # A larger model with fewer rounds says nothing against more rounds of a smaller one.
        ({("s", 4): True, ("s", 8): False, ("l", 4): True}, ("not seen up to", ("s", 8))),
        ({("s", 8): False, ("l", 4): True, ("l", 8): True}, ("holds from", ("l", 8))),
        ({("s", 4): False, ("l", 4): True, ("l", 8): True}, ("holds from", ("l", 4))),
        ({("s", 4): True}, ("holds from", ("s", 4))),
        ({("s", 4): True, ("l", 4): False}, ("not seen up to", ("l", 4))),
    ],
)
def test_scales_that_are_larger_in_one_way_alone(seen, expected):
    by_scale = {
        scale: [SimpleNamespace(status="seen" if found else "open")]
        for scale, found in seen.items()
    }
    assert word_of(by_scale, ["s", "l"]) == expected


def test_trends_are_paired_by_seed(tmp_path):
    campaign = checked(tmp_path)
    by_seed = {0: 0.01, 1: 0.02, 2: 0.03}
    found = effects(
        ledger_of(campaign, gap(lambda c: by_seed[c.seed] * (2 if c.rounds == 8 else 1)))
    )
    told, a_decade = verdict(campaign, found["better"]), 1 / math.log10(2)
    assert told.over_rounds.mean == pytest.approx(0.02 * a_decade) and told.over_rounds.count == 3
    half = 4.302653 * 0.01 / math.sqrt(3) * a_decade
    assert told.over_rounds.half == pytest.approx(half, rel=1e-6)
    assert told.over_size.count == 0


def test_a_trend_is_the_slope_over_all_levels_that_differ_in_nothing_else(tmp_path):
    """Each seed's is that of least squares with an intercept for each group."""
    stages = {"1": stage(("small", "large", "huge"), (4, 8), (2,))}
    sizes = {name: size_of(n, 8) for name, n in (("small", 1e3), ("large", 4e3), ("huge", 1e4))}
    campaign = checked(tmp_path, stages=stages, sizes=sizes)
    rng, made = np.random.default_rng(0), {}

    def difference(c):
        return made.setdefault((c.size, c.rounds, c.seed), 0.1 * rng.normal())

    ledger = ledger_of(campaign, gap(difference))
    for cell in [c for c in ledger.found if c.size == "huge" and c.rounds == 8]:
        del ledger.found[cell]  # one group has two levels alone
    told = verdict(campaign, effects(ledger)["equal"])
    slopes = []
    for seed in range(3):
        rows = [(s, r, d) for (s, r, of), d in made.items() if of == seed and (s, r) != ("huge", 8)]
        x = [[math.log10(sizes[s]["params"]), r == 4, r == 8] for s, r, _ in rows]
        slopes.append(np.linalg.lstsq(np.array(x, float), [d for *_, d in rows], None)[0][0])
    assert told.over_size.mean == pytest.approx(np.mean(slopes))
    half = 4.302653 * np.std(slopes, ddof=1) / math.sqrt(3)
    assert told.over_size.half == pytest.approx(half, rel=1e-6)


def test_a_trend_over_parameters_and_tokens_is_at_as_many_tokens_a_parameter(tmp_path):
    stages = {"1": stage(("small", "large"), (4, 16), (2,))}
    sizes = {"small": size_of(1e3, 8), "large": size_of(3.9e3, 8)}  # as many but for a fortieth
    campaign = checked(tmp_path, stages=stages, sizes=sizes)
    gaps = {("small", 4): 0.06, ("small", 16): 0.03, ("large", 4): 0.07, ("large", 16): 0.04}
    ledger = ledger_of(campaign, gap(lambda c: gaps[c.size, c.rounds] + jitter(c)))
    told = verdict(campaign, effects(ledger)["better"])
    assert told.over_both.mean == pytest.approx((0.04 - 0.06) / math.log10(3.9), rel=1e-6)
    assert told.over_size.mean == pytest.approx(0.01 / math.log10(3.9), rel=1e-6)
    assert told.over_both.seen == told.over_size.seen == 3.9 and told.over_rounds.seen == 4


def test_a_trend_is_told_for_what_was_seen_and_ten_times_at_most():
    half, whole = (Trend(0.2, 0.1, 3, seen) for seen in (2.0, 16.0))
    [told] = told_trend("rounds", half)
    points = [100 * value * math.log10(2) for value in (0.2, 0.1)]
    assert told.startswith(f"With 2 times the rounds the difference changes by +{points[0]:.1f} ± ")
    assert f"± {points[1]:.1f} points (it grows)" in told
    [told] = told_trend("rounds", whole)
    assert told.startswith("With 10 times the rounds the difference changes by +20.0 ± 10.0 ")
    assert [*told_trend("rounds", Trend(None, None, 0, 1.0))] == []


def test_slopes_lend_each_other_their_spread(tmp_path):
    """Three seeds that happen to agree are no proof: other claims' slopes vary."""
    campaign = checked(tmp_path)
    changes = {"equal": lambda seed: 0.02, "better": lambda seed: 0.02 + 0.01 * (seed - 1)}

    def loss(cell):
        grows = cell.rounds == 8 and cell.arm != "diloco"
        claim = "equal" if cell.arm == "ddp" else "better"
        return 2.0 / (1.0 + (changes[claim](cell.seed) if grows else 0.0))

    found = effects(ledger_of(campaign, loss))
    alone = {name: verdict(campaign, of).over_rounds for name, of in found.items()}
    beside = {one.claim: one.over_rounds for one in verdicts(campaign, found)}
    assert alone["equal"].half < 1e-9 < beside["equal"].half < beside["better"].half
    assert beside["equal"].mean == alone["equal"].mean


def test_a_trend_over_regions_is_at_equal_size_and_rounds(tmp_path):
    campaign = checked(tmp_path, stages={"1": stage(("small", "large"), (4,), (2, 4))})
    loss = gap(
        lambda c: {2: 0.01, 4: 0.02}[c.regions] + (0.5 if c.size == "large" else 0) + jitter(c)
    )
    told = verdict(campaign, effects(ledger_of(campaign, loss))["better"])
    assert told.over_regions.mean == pytest.approx(0.01 / math.log10(2), rel=1e-6)
    assert told.over_regions.count == 3 and told.over_rounds.count == 0


def test_seeds_that_lack_a_rung_tell_nothing_of_atold_trend(tmp_path):
    """Of 4 and 8 rounds they give another slope than of 4, 8 and 16, where a trend is curved."""
    stages = {
        "1": stage(("small",), (4, 8, 16), (2,)),
        "2": stage(("small",), (4, 8), (2,), seeds=(0, 1, 2, 3)),
    }
    campaign = checked(tmp_path, stages=stages)
    gaps = {4: 0.01, 8: 0.05, 16: 0.06}
    ledger = ledger_of(campaign, gap(lambda c: gaps[c.rounds] + jitter(c)), ("1", "2"))
    assert {c.seed for c in ledger.found if not c.tunes} == {0, 1, 2, 3}
    told = verdict(campaign, effects(ledger)["better"])
    assert told.over_rounds.count == 3
    assert told.over_rounds.mean == pytest.approx(0.025 / math.log10(2), rel=1e-6)


def test_no_verdict_from_two_seeds_and_failures_are_told(tmp_path):
    campaign = checked(tmp_path)
    loss = gap(lambda c: 0.05 + jitter(c))
    ledger = ledger_of(campaign, lambda c: None if c.seed == 2 and c.arm == "ddp" else loss(c))
    found = effects(ledger)
    assert all(e.adjusted is None and e.failed == (2,) for e in found["equal"])
    assert verdict(campaign, found["equal"]).word == "no verdict"
    assert verdict(campaign, found["better"]).word == "contradicted"
    text = page(gather(ledger))
    assert "too few seeds" in text and text.count("it diverged") == 2 and "(failed: 1)" in text


def test_claims_on_variants_are_a_family_of_their_own(tmp_path):
    """However many settings are tried, what is said of methods stays."""
    arms = config(tmp_path).arms.to_dict() | {"often": variant("diloco", method={"period": 1})}
    claims = config(tmp_path).claims.to_dict()
    more = claims | {"often": claim("Often", "0000.00005", "often", "diloco", 0.0, "")}

    def found(claims):
        campaign = checked(tmp_path, arms=arms, claims=claims)
        return effects(ledger_of(campaign, gap(lambda c: 0.02 + jitter(c))))

    alone, beside = found(claims), found(more)
    assert {name: beside[name] for name in alone} == alone
    tests = beside["often"]
    assert min(e.adjusted for e in tests) == pytest.approx(len(tests) * min(e.p for e in tests))


def test_a_run_that_failed_leaves_its_rung_open(tmp_path):
    """Four seeds, one of them lost: the three others alone would be `opposite`."""
    stages = {"1": stage(("small",), (4, 8), (2,), seeds=(0, 1, 2, 3))}
    campaign = checked(tmp_path, stages=stages)
    loss = gap(lambda c: 0.05 + jitter(c))
    ledger = ledger_of(campaign, lambda c: None if (c.seed, c.rounds) == (3, 4) else loss(c))
    first, second = effects(ledger)["equal"]
    assert first.adjusted < 0.05 and first.failed == (3,) and first.status == "open"
    assert second.status == "opposite" and not second.failed


def test_what_was_spent_equally(tmp_path):
    """`here` is twice as fast and sends half as much."""
    campaign = checked(tmp_path)

    def curve(scale, losses):
        return [[i, 10 * i, 8 * scale * i, scale * i, y] for i, y in enumerate((6.0, *losses))]

    ledger = ledger_of(campaign, gap(lambda c: 0.0))
    for cell, one in ledger.found.items():
        fast = cell.arm == "diloco"
        one["curve"] = curve(1, (4, 3, 2.5, 2)) if fast else curve(2, (5, 4.4, 3, 2))
        one["bytes_sent"], one["virtual"] = (32, {"seconds": 4}) if fast else (64, {"seconds": 8})
    effect = effects(ledger)["equal"][0]
    assert effect.bytes == effect.seconds == 0.5
    assert effect.at_equal_time == effect.at_equal_bytes == pytest.approx(2 / 4.4 - 1)


def test_tokens_to_the_loss_of_the_other(tmp_path):
    """`here` has the other's final loss after 30 of 40 tokens, and half way to its own next."""
    campaign = checked(tmp_path)
    ledger = ledger_of(campaign, gap(lambda c: 0.0))
    for cell, one in ((c, r) for c, r in ledger.found.items() if not c.tunes):
        losses = {"diloco": (4.0, 3.0, 2.0, 1.8), "ddp": (5.0, 4.0, 3.0, 2.0)}
        of = losses.get(cell.arm, (5.0, 4.0, 2.0, 1.6))
        one["curve"] = [[i, 10 * i, 8 * i, i, y] for i, y in enumerate((6.0, *of))]
        one["loss"] = of[-1]
    found = effects(ledger)
    assert found["equal"][0].tokens.mean == pytest.approx(30 / 40)
    assert found["equal"][0].tokens.half == pytest.approx(0.0, abs=1e-9)
    assert found["better"][0].tokens.mean == pytest.approx(40 / 35)  # `there` has the lower one


def test_numbers_are_written_without_exponents():
    params = (0.18e6, 0.39e6, 2.6e6, 10.3e6, 121e6, 999e6, 1e9, 107e9)
    told = ("0.18M", "0.39M", "2.6M", "10M", "121M", "999M", "1B", "107B")
    assert tuple(map(count, params)) == told
    assert [short(x, 3) for x in (30.0, 43.29, 999.6, 1224.0)] == ["30", "43.3", "1,000", "1,224"]


# -- the page --------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    """Records on disk, and the arguments that name their campaign."""
    campaign = checked(tmp_path)
    ledger = ledger_of(campaign, gap(lambda c: 0.02 + jitter(c)))
    for cell, one in ledger.found.items():
        write(campaign, cell, one)
    file = tmp_path / "config.py"
    file.write_text(
        "import pathlib\nfrom campaign_cases import config\n"
        f"def get_config():\n    return config(pathlib.Path({str(tmp_path)!r}))\n"
    )
    return campaign, [f"--config={file}", f"--pages={tmp_path / 'docs'}"], tmp_path / "docs"


def test_runs_at_rates_that_were_replaced_count_nowhere_and_are_listed(written, monkeypatch):
    campaign, arguments, docs = written
    ledger = read(campaign)
    best = next(c for c in ledger.found if c.arm == "diloco" and not c.tunes)
    before = dataclasses.replace(best, point="learning_rate=0_2")
    path = write(campaign, before, record(campaign, before, 9.0))
    seen = []
    monkeypatch.setattr(fits, "points_of", lambda records: seen.extend(records) or [])
    assert command.main(arguments) == 0
    text = (docs / "campaign.md").read_text()
    assert f"`small/diloco/{path.name}` | at learning rates that learning_rate=0_5" in text
    assert "+2.0 ± 0.1 %" in text, "as without it"
    assert seen and all(one["loss"] < 9.0 for one in seen)


def test_a_page_is_made_from_records_and_checked(written, capsys):
    campaign, arguments, docs = written
    assert command.main([*arguments, "--check"]) == 1  # there is none yet
    assert command.main(arguments) == 0 and command.main([*arguments, "--check"]) == 0
    text = (docs / "campaign.md").read_text()
    order = [text.index(word) for word in ("**contradicted", "## equal", "## Learning rates")]
    assert order == sorted(order)
    assert "+2.0 ± 0.1 %" in text and "outer 0.5 (of 0.2, 0.5)" in text
    assert "do not carry a fit yet" in text and "None: no run failed" in text
    # A figure that no record bears out fails.
    (docs / "campaign.md").write_text(text.replace("+2.0 ± 0.1 %", "-2.0 ± 0.1 %", 1))
    capsys.readouterr()
    assert command.main([*arguments, "--check"]) == 1
    assert "-2.0 ± 0.1 %" in capsys.readouterr().out
    (docs / "campaign.md").write_text(text)
    # So does a picture of other records, and a record that the page does not know.
    cell = next(c for c in read(campaign).found if c.arm == "diloco" and not c.tunes)
    write(campaign, cell, record(campaign, cell, 2.3))
    assert command.main([*arguments, "--check"]) == 1
    shown = capsys.readouterr().out
    assert "overview.png does not show" in shown and "campaign.md does not agree" in shown
    assert command.main(arguments) == 0 and command.main([*arguments, "--check"]) == 0
    assert digest_in(docs / "campaign" / "equal.png")


def test_a_picture_has_a_panel_for_each_way_to_scale_and_shows_all_points(tmp_path, monkeypatch):
    campaign = checked(tmp_path)
    rungs = [
        Rung(size, rounds, regions, split)
        for size in ("small", "large")
        for rounds in (4, 8, 16)
        for regions in (2, 4)
        for split in ("iid", "topic")
    ]
    claim = campaign.claims["equal"]
    one = effects(ledger_of(campaign, gap(jitter)))["equal"][0]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw(campaign, claim, [dataclasses.replace(one, rung=rung) for rung in rungs], tmp_path / "a")
    assert [axes.get_xlabel() for axes in drawn[0].axes] == [
        "rounds of 2 steps",
        "parameters",
        "regions",
    ]
    for axes in drawn[0].axes:
        low, high = axes.get_xlim()
        points = [float(bars.lines[0].get_xdata()[0]) for bars in axes.containers]
        assert len(points) == len(rungs) and low < min(points) and max(points) < high
        places = np.log2(axes.get_xticks())
        away = np.abs(np.log2(points)[:, None] - places).min(axis=1)
        assert away.max() < np.diff(places).min() / 4, "nearest to its own scale"
    draw(campaign, claim, [one], tmp_path / "b")
    assert len(drawn[1].axes) == 1, "of one scale: against rounds"
    few = dataclasses.replace(one, rung=dataclasses.replace(one.rung, rounds=8), adjusted=None)
    draw(campaign, claim, [one, few], tmp_path / "c")
    (axes,) = drawn[2].axes
    assert [bars.lines[0].get_alpha() for bars in axes.containers] == [1.0, 0.35]
    assert len(axes.lines[0].get_xdata()) == 1, "what no verdict counts is not joined"
    assert [text.get_text() for text in drawn[2].legends[0].get_texts()][-2] == "too few seeds"


def test_hours_are_of_the_rungs_that_are_shown(written):
    campaign, arguments, docs = written
    ledger = read(campaign)
    cell = next(c for c in ledger.found if c.arm == "diloco" and not c.tunes)
    alone = dataclasses.replace(cell, size="large", rounds=4, regions=4)  # no other arm has it
    write(campaign, alone, record(campaign, alone, 2.0, core_seconds=36_000.0))
    on_a_card = {**ledger.found[cell], "core_seconds": 720.0}
    on_a_card["machine"] = {**on_a_card["machine"], "backend": "gpu"}
    write(campaign, cell, on_a_card)
    assert command.main(arguments) == 0
    text = (docs / "campaign.md").read_text()
    # Two arms of 2 rungs x 3 seeds, and of 6 runs that tune: 23 of them on a CPU, 3 s each.
    assert text.count("What is shown took 0.02 core-hours and 0.20 process-hours on accel") == 2
    assert " runs, 10.04 core-hours and 0.20 process-hours on accelerators." in text


def test_what_ran_on_an_accelerator_has_a_command_of_its_own(written):
    campaign, arguments, docs = written
    for cell, one in ledger_of(campaign, gap(lambda c: 0.02), ("1", "2")).found.items():
        if cell.size == "large":
            machine = {**one["machine"], "backend": "gpu"}
            write(campaign, cell, {**one, "machine": machine, "core_seconds": 360.0})
    assert command.main(arguments) == 0
    text = (docs / "campaign.md").read_text()
    told = text[text.index("From nothing", text.index("## equal")) :].partition("```\n\n")[0]
    # Stage 2: two arms of 2 rungs x 4 seeds, and of 6 runs that tune, 360 s each.
    assert "on two cores, a process each, then 2.8 process-hours on an accelerator" in told
    one, other = told.split("--only=equal")[1:]
    assert "    --until=1 " in one and "    --since=2 --until=2 " in other


def test_a_command_goes_to_the_stage_of_the_last_seed_that_is_shown(tmp_path):
    rungs = ("small",), (4, 8), (2,)
    stages = {"1": stage(*rungs), "2": stage(*rungs, seeds=(0, 1, 2, 3))}
    campaign = checked(tmp_path, stages=stages)
    loss = gap(lambda c: 0.02 + jitter(c))
    for ran, last in ((("1",), "1"), (("1", "2"), "2")):
        text = page(gather(ledger_of(campaign, loss, ran)))
        assert f"--only=equal \\\n    --until={last} --config" in text


def test_a_page_tells_what_names_mean_and_what_would_turn_a_verdict(tmp_path):
    arms = dict(config(tmp_path).arms)
    arms["heavy"] = variant("diloco", method={"outer": {"momentum": 0.99}})
    claims = {
        "equal": claim("Equal", "0000.00001", "diloco", "ddp", 0.01, "at more rounds"),
        "heavier": claim("Heavier", "0000.00002", "heavy", "diloco", 0.0, "at more rounds"),
    }
    campaign = checked(tmp_path, arms=arms, claims=claims)
    losses = {"diloco": 1.9, "ddp": 2.0, "heavy": 2.1}
    ledger = ledger_of(campaign, lambda c: losses[c.arm] * (1 + NOISE[c.seed]) * (1 + jitter(c)))
    text = page(gather(ledger))
    assert "| heavy | diloco | adamw | diloco, but outer.momentum=0.99 |" in text
    assert text.index("### Methods") < text.index("[Equal](#equal)")
    assert text.index("### Settings") < text.index("[Heavier](#heavier)")
    turned = text[text.index("## equal") :].partition("What would change our mind: ")[2]
    assert turned.startswith("differences that are not shown to be below +1 %, at more rounds.")
    turned = text[text.index("## heavier") :].partition("What would change our mind: ")[2]
    words = "differences below 0, with corrected p-values below 0.05, at more rounds."
    assert turned.startswith(words) and "`heavy` trains at the rates of `diloco`." in text
    assert "Rungs as claimed: 2; the opposite: 0; open: 0." in text


def test_a_page_tells_where_a_claim_is_seen_that_is_not_seen_everywhere(tmp_path):
    campaign = checked(tmp_path)
    loss = gap(lambda c: (-0.02 if c.rounds == 4 else 0.02) + jitter(c))
    text = page(gather(ledger_of(campaign, loss)))
    section = text[text.index("## better") :].partition("## Learning")[0]
    small = count(campaign.sizes["small"].params)
    assert f"Seen at {small}, 4 rounds, 2 regions.\n" in section
    assert f"The opposite at {small}, 8 rounds, 2 regions.\n" in section
    everywhere = page(gather(ledger_of(campaign, gap(lambda c: -0.02 + jitter(c)))))
    assert "Seen at" not in everywhere


def judged(root, of, ran=("1",), **changes):
    campaign = checked(root, **changes)
    return Judged(campaign, effects(ledger_of(campaign, gap(of), ran)))


def test_rungs_of_two_corpora_agree_differ_or_are_open(tmp_path):
    def gaps(of):
        return lambda cell: of[cell.rounds] + jitter(cell)

    here = judged(tmp_path, gaps({4: 0.02, 8: 0.02}))
    there = judged(tmp_path, gaps({4: 0.03, 8: -0.02}))
    found = {(e.claim, e.rung.rounds): agreement(e, other) for e, other in pairs(here, there)}
    assert found == {(n, r): word for r, word in ((4, AGREE), (8, DIFFER)) for n in CLAIMS}
    noisy = judged(tmp_path, lambda cell: 0.1 * (cell.seed - 1))
    assert {agreement(*pair) for pair in pairs(here, noisy)} == {"open"}
    text = section(here, there)
    assert "both pages: 4. Agree: 2 (2 of 2 after 4 rounds, 0 of 2 after 8 rounds)." in text
    assert "Differ: 2. Open: 0. Of 2 claims 0 agree" in text
    assert "at 4 of the rungs the two 95 % intervals do not overlap" in text
    assert "at 0 of the rungs" in section(here, here)
    first = text.splitlines()[8]
    assert first == (
        "| [better](#better) | 8 rounds, 2 regions | i.i.d. "
        "| 0.001M, 3 seeds: +2.0 ± 0.1 %, opposite | 0.001M, 3 seeds: -2.0 ± 0.1 %, seen | differ |"
    )


def test_rungs_are_compared_at_the_nearest_size_and_with_the_same_claim(tmp_path):
    def of(cell):
        return 0.02 + jitter(cell)

    sizes = {"tiny": size_of(0.8e3, 8), "big": size_of(3e3, 8), "far": size_of(8.1e3, 8)}
    stages = {"1": stage(tuple(sizes), (4,), (2,))}
    one = claim("Almost", "0000.00001", "diloco", "ddp", 0.02, "a gap")
    claims = {"equal": one, "better": config(tmp_path)["claims"]["better"].to_dict()}
    here = judged(tmp_path, of, sizes=sizes, stages=stages, claims=claims)
    there = judged(tmp_path, of, ("1", "2"))
    found = [(e.claim, e.rung.size, other.rung.size) for e, other in pairs(here, there)]
    assert found == [("better", "tiny", "small"), ("better", "big", "large")]
    slower = judged(tmp_path, of, period=4)  # H: as many rounds are more steps
    assert "No rung is on this page and on that of [texts](campaign.md)." in section(here, slower)


def test_a_page_beside_another_corpus(written, capsys):
    campaign, arguments, docs = written
    file = arguments[0].removeprefix("--config=")
    beside = [*arguments, f"--config.beside={file}", "--config.page=second", "--config.text=tales"]
    assert command.main(beside) == 0 and command.main([*beside, "--check"]) == 0
    text = (docs / "second.md").read_text()
    assert "## On both corpora" in text and "| tales | texts | |" in text
    assert "Agree: 4 (" in text and "beside those on [texts](campaign.md)" in text
    assert f"`{campaign.records}` and `{campaign.records}`" in text
    with pytest.raises(RefusedError, match="nowhere"):
        command.main([*arguments, "--config.beside=nowhere.py"])
    for no_campaign in (["--config.beside=diloco"], ["--config=diloco"]):
        with pytest.raises(RefusedError, match="make it with evidence"):
            command.main([*arguments, *no_campaign])


def test_without_records_nothing_is_written(tmp_path, written):
    _, arguments, docs = written
    with pytest.raises(RefusedError, match="cannot make the pages") as refused:
        command.main([*arguments, f"--config.records={tmp_path / 'none'}"])
    assert "run the campaign first" in str(refused.value) and not docs.exists()


@pytest.mark.parametrize("config", command.CAMPAIGNS)
def test_the_pages_of_this_repository_agree_with_their_records(config, monkeypatch):
    monkeypatch.chdir(ROOT)
    ledger = read(plan(load_config(config, [])[0]))
    found = command.disagreements(gather(ledger, config), ROOT / "evidence/pages")
    assert ledger.found and found == []


@pytest.mark.parametrize("page", ["README.md", "pages/scale.md", "pages/wikitext.md"])
def test_links_lead_somewhere(page):
    """To files; within a page, to a heading of it."""
    file = ROOT / "evidence" / page
    text = file.read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", text):
        assert (file.parent / target).exists(), target
        assert target or anchor in anchors, anchor


# -- the fit ---------------------------------------------------------------------------------------

TERMS = (1.2, 8.0, 0.3, 40.0, 0.35)


def points(noise=0.0, sizes=(2e5, 7e5, 3e6, 1e7)):
    rng, (e, a, alpha, b, beta) = np.random.default_rng(0), TERMS
    return [
        (n, d, seed, (e + a / n**alpha + b / d**beta) * (1 + noise * rng.standard_normal()))
        for n in sizes
        for d in (4e5, 1.5e6, 6e6, 2.4e7)
        for seed in range(3)
    ]


def alone(some):
    return fits.fit({"arm": some})["arm"]


def test_arms_share_the_loss_of_the_text_and_nothing_else():
    """An arm whose scales tell little of E takes it from one whose scales tell more."""
    e, a, alpha, b, beta = other = (TERMS[0], 20.0, 0.25, 15.0, 0.3)
    weak = [
        (n, d, seed, e + a / n**alpha + b / d**beta)
        for n, d, seed, _ in points(sizes=(2e5, 7e5, 3e6))
        if d < 1e7 and (n < 3e6 or d < 1e6)
    ]
    found = fits.fit({"strong": points(), "weak": weak})
    assert found["strong"].terms == pytest.approx(TERMS, rel=1e-3)
    assert found["weak"].terms == pytest.approx(other, rel=1e-3)
    assert found["weak"].smallest == (2e5, 4e5) and max(f.error for f in found.values()) < 1e-6


def test_a_fit_finds_its_terms_and_extrapolates():
    found = alone(points())
    assert found.error < 1e-6
    true = TERMS[0] + TERMS[1] / 1.5e8**0.3 + TERMS[3] / 3e9**0.35
    assert found.at(1.5e8, 3e9)[0] == pytest.approx(true, rel=1e-3)
    noisy = alone(points(noise=0.003))
    loss, low, high = noisy.at(2e7, 4e8)
    true = TERMS[0] + TERMS[1] / 2e7**0.3 + TERMS[3] / 4e8**0.35
    assert low < loss < high and loss == pytest.approx(true, rel=0.05)
    assert noisy.error == pytest.approx(0.003, rel=0.5)


def test_the_scale_that_a_fit_misses_most_is_told():
    rows = [(n, d, s, loss * (1.05 if (n, d) == (1e7, 4e5) else 1.0)) for n, d, s, loss in points()]
    params, tokens, error = alone(rows).furthest
    assert (params, tokens) == (1e7, 4e5) and -0.05 < error < -0.01
    found = alone(rows)
    assert found.largest == (1e7, 2.4e7) and found.smallest == (2e5, 4e5)
    e, a, alpha, b, beta = found.terms
    fitted = e + a / 1e7**alpha + b / 4e5**beta
    measured = next(loss for n, d, _, loss in rows if (n, d) == (1e7, 4e5))
    assert error == pytest.approx(fitted / measured - 1)


def test_seeds_of_a_scale_are_one_number_of_tokens():
    """By how its texts end, a seed counts some targets more or fewer."""
    records = [
        {
            "params": 180_672,
            "tokens": rounds * 15_360 - 15 * seed,
            "loss": 2.0 + seed,
            "cell": {"size": "180k", "rounds": rounds, "seed": seed},
        }
        for rounds, seeds in ((24, 3), (96, 3), (384, 2))
        for seed in range(seeds)
    ]
    found = fits.points_of(records)  # the longest run lacks a seed
    assert {point[1] for point in found} == {24 * 15_360 - 15, 96 * 15_360 - 15}
    assert [point[2:] for point in found] == [(s, 2.0 + s) for s in (0, 1, 2)] * 2


def test_two_sizes_carry_no_fit():
    few = points(sizes=(2e5, 7e5))
    assert fits.carried(few) == ["1 more sizes"] and not fits.carried(points())
    with pytest.raises(ValueError, match="1 more sizes"):
        fits.fit({"full": points(), "few": few})


def test_a_scale_of_two_seeds_does_not_count():
    small, large = points(sizes=(2e5,)), points(sizes=(7e5, 3e6))
    corner = [p for p in large if p[1] == 4e5 and (p[0] < 1e6 or p[2] < 2)]
    assert fits.carried(small + corner) == ["1 more sizes", "1 more scales"]


def test_scales_in_a_corner_tell_less_than_a_full_ladder():
    """Of the largest size one length, of the smallest all: leaving one out moves the prediction."""

    def width(some):
        _, low, high = alone(some).at(1.5e8, 3e9)
        return high - low

    lengths = {2e5: 3, 7e5: 2, 3e6: 1}
    some = [p for p in points(noise=0.003) if p[1] < 2e7 and p[0] < 1e7]
    corner = [p for p in some if sorted({q[1] for q in some}).index(p[1]) < lengths[p[0]]]
    assert len({p[:2] for p in corner}) == fits.LEAST_SCALES and fits.carried(corner) == []
    assert width(corner) > 2 * width(some)


def test_a_term_that_no_scale_tells_is_named():
    flat = [(n, d, seed, 2.0 + 40.0 / d**0.35) for n, d, seed, _ in points()]
    assert "A" in alone(flat).undetermined
    assert alone(points()).undetermined == ()
