"""`plan` end to end: tables, JSON, picture, and what a wrong config is told."""

import importlib
import io
import json

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from experiments.plan import main as plan_command
from experiments.plan.screen import show_answer
from experiments.plan.show import lift_labels, show
from lowcomm_jax.planner.dry_run import Rehearsal
from lowcomm_jax.planner.search import FRAGMENTS, SEARCHED_CODECS


class Planned:
    """A shipped config, planned once, with all tables and the rows that stand in them.

    `built` and `played` are the methods whose programs are built, and those that are played: all
    that takes long in a plan.
    """

    def __init__(self, name, folder):
        built, self.played, self.folder = [], [], folder
        play, shown = Rehearsal.play, []

        def counted(rehearsal, *schedule):
            self.played.append(rehearsal.method)
            if all(rehearsal is not one for one in built):
                built.append(rehearsal)
            return play(rehearsal, *schedule)

        config = importlib.import_module(f"configs.plan.{name}").get_config()
        text = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Rehearsal, "play", counted)
            patch.setattr(plan_command, "show", lambda *given: shown.append(given) or show(*given))
            console = Console(file=text, width=160)
            self.result = plan_command.planned(config, folder, console, details=True)
        self.built, self.text = built, text.getvalue()
        ((_, self.rows, _),) = shown


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return Planned("template", tmp_path_factory.mktemp("plan") / "template")


@pytest.fixture(scope="module")
def dilocox(tmp_path_factory):
    return Planned("dilocox_107b", tmp_path_factory.mktemp("plan") / "dilocox")


@pytest.fixture(scope="module")
def streaming(tmp_path_factory):
    return Planned("streaming_100b", tmp_path_factory.mktemp("plan") / "streaming")


@pytest.mark.parametrize(
    "name", ["template", "dilocox", pytest.param("streaming", marks=pytest.mark.slow)]
)
def test_shipped_configs_run(name, request):
    """All of them run in `tests/test_golden.py`, too."""
    planned = request.getfixturevalue(name)
    result, text, folder = planned.result, planned.text, planned.folder
    # A row is played again with the overlap that was asked for; AllReduce is what all compare with.
    of_rows = 2 * len(result["rows"]) + 1
    # Of the search a setting once, whatever its codec, and once for the bytes of each codec.
    searched = result["settings_tried"] + result["settings_left_out"]
    settings, sizes = searched // len(SEARCHED_CODECS), len(FRAGMENTS) * len(SEARCHED_CODECS)
    assert result["settings_tried"] > settings / 2
    built, played = len(planned.built), len(planned.played)
    assert built <= of_rows + sizes and played <= of_rows + settings + sizes, (built, played)
    assert result["planning_seconds"] > 0
    assert json.loads((folder / "plan.json").read_text()) == json.loads(json.dumps(result))
    assert (folder / "plan.png").read_bytes()[:4] == b"\x89PNG"
    for row in result["rows"]:
        assert row["method"]["name"] in text and 0 < row["utilisation"] <= 1 + 1e-9
        assert row["hours"] > 0 and row["memory"]["state_total"] > 0


def test_dilocox_warns_of_what_never_catches_up(dilocox):
    result, text = dilocox.result, dilocox.text
    speedup = next(r for r in result["rows"] if r["method"]["name"] == "dilocox")["speedup"]
    assert speedup == pytest.approx(395.3, abs=0.1)
    assert "never catch up" in text and "outside the law's domain" in text


def test_losses_by_law_and_with_penalty_stand_apart(template):
    result, text = template.result, template.text
    by_law = {r["method"]["name"]: r["law_loss"] for r in result["rows"]}
    total = {r["method"]["name"]: r["loss_with_penalty"] for r in result["rows"]}
    assert 2.4 < by_law["allreduce"] < by_law["diloco"] < 2.5
    assert by_law["streaming"] is None and by_law["diloco"] < total["streaming"] < 2.6
    assert by_law["noloco"] is total["noloco"] is None
    assert result["best"]["penalty_nats"] <= 0.03
    assert "loss, scaling law alone" in text and "loss, law + penalty" in text
    assert "no expected loss: unknown: no scaling law is published for noloco" in text


def test_both_tables_name_the_baseline(template):
    result, text = template.result, template.text
    assert result["baseline"] in text and "two-shot" in result["baseline"]
    routes = {r["method"]["name"]: r["method"]["route"] for r in result["rows"]}
    assert routes["allreduce"] == "two_shot" and routes["eager"] == "all_gather"


def test_names_with_brackets_are_printed_as_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan_command, "search", lambda work, bound_nats, progress: (None, [], 0))
    name = "a[/x] :b:"
    network = f"{{regions: 2, bandwidth_gbps: 1.0, delay_ms: 1.0, name: '{name}'}}"
    given = ["--config=configs/plan/template.py", f"--config.network={network}", "--details"]
    assert plan_command.main([*given, f"--workdir={tmp_path}"]) == 0
    assert f"network: {name} (assumed" in capsys.readouterr().out


def test_a_narrow_terminal_shows_every_method_in_full(template):
    text = io.StringIO()
    console = Console(file=text, width=80)
    show_answer(template.result, template.rows, console)
    show(template.result, template.rows, console)
    assert "…" not in text.getvalue()
    for row in template.result["rows"]:
        assert f"{row['hours']:.4g}" in text.getvalue()


def test_labels_of_points_close_together_lie_apart():
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(0, 4))
    places = [(1.0, 1.0), (1.01, 1.0), (1.02, 1.001), (5.0, 2.0)]
    labels = [
        axes.annotate("a long name", place, textcoords="offset points", xytext=(5, 4))
        for place in places
    ]
    lift_labels(figure, labels)
    boxes = [label.get_window_extent() for label in labels]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert labels[3].xyann == labels[0].xyann == (5, 4)  # these were free
