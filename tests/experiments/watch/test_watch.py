"""A run is watched: its files as they grow, what is wrong with it, and the page that is served."""

import html
import io
import json
import re
import threading
import time
import urllib.error
import urllib.request

import made_runs
import pytest
from made_runs import logged
from rich.console import Console

from experiments.__main__ import main as command
from experiments.cli import RefusedError
from experiments.watch.page import Server
from experiments.watch.terminal import screen
from experiments.watch.view import Watch
from experiments.workdir import METRICS
from lowcomm_jax.network import parse, uniform

PERIOD, LATE = 5, 2


def header(here, regions, network=None):
    about = {"steps": 40, "method": "made up", "data": {"corpus": "<text>"}}
    return made_runs.header(regions, here, config={"network": network}, **about)


def event(kind, step, here, key, **more):
    crossed = [1000 * (kind == "send")] * len(here)
    more = {"staleness": [-1] * len(here), "key": key, "bytes_sent": crossed, **more}
    return made_runs.event(kind, step, len(here), bytes_received=crossed, **more)


def steps(here, first, last, job=False, **more):
    """Records of steps that send every PERIOD steps and land LATE steps later."""
    n, found = len(here), []
    for t in range(first, last + 1):
        events = []
        if t > PERIOD and t % PERIOD == LATE:
            land = {"mean_norm": [t / 7], "staleness": [LATE] * n}
            if job:
                land |= {"travel_seconds": [0.25], "waited_seconds": [0.5]}
            events.append(event("land", t, here, f"0@{t - LATE}", **land))
        if t % PERIOD == 0:
            events.append(event("send", t, here, f"0@{t}"))
        fields = {"loss": [4.0 - t / 40 + r / 10 for r in here], "participation": 1.0}
        fields |= dict.fromkeys(("bytes_sent", "bytes_received"), [1000 * (t // PERIOD)] * n)
        fields |= {"seconds": t / 2, "tokens_per_second": 20.0 * n, "events": events, **more}
        found.append(made_runs.step(t, n, **fields))
        if t % 10 == 0:
            found.append({"kind": "interval", "step": t, "steps": 10, "seconds": t / 2})
    return found


def evaluation(step, value, **more):
    found = {"kind": "eval", "step": step, "tokens": 0, "anchor": value, "final": False}
    return found | {"mean_of_regions": value, "document_sum": [], "seconds": step / 2, **more}


def log(folder, records, step=-1):
    logged(folder / METRICS, *records, step=step)


@pytest.fixture
def run(tmp_path):
    """A run of one process and three regions, at step 20 of 40."""
    here = range(3)
    log(tmp_path / "run", [header(here, 3), evaluation(0, 5.5), *steps(here, 1, 20)])
    log(tmp_path / "run", [evaluation(20, 3.25)], step=20)
    return tmp_path / "run"


def jobs(folder, ends=(20, 20), changes=None):
    """Two jobs, each with its own file; `changes`: what differs in region 1's records."""
    for r, end in enumerate(ends):
        records = [header([r], 2), *steps([r], 1, end, job=True), evaluation(end, 3.0)]
        if r == 1 and changes is not None:
            records = changes(records)
        log(folder / f"region{r}", records)
    return folder


def shown(view, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(screen(view))
    return console.file.getvalue()


def test_the_numbers_of_one_process(run):
    view = Watch(run).look()
    assert (view["step"], view["steps"], view["complete"], view["jobs"]) == (20, 40, False, False)
    assert view["eval"] == {"step": 20, "done": 20, "loss": 3.25}
    assert view["left_s"] == pytest.approx(20 / 2)  # two steps a second
    for r, row in enumerate(view["regions"]):
        assert row.loss == pytest.approx(3.5 + r / 10)
        assert (row.participation, row.exchanges) == (1.0, 4)
        assert (row.staleness, row.stalest) == (LATE, LATE)
        assert row.sent == row.received == 4000
        assert row.rate == pytest.approx(2000 / 5)  # two sends in the five seconds of ten steps
    marks = view["timeline"]["lanes"][1]
    assert marks == [*["step"] * 4, *["sent", "under way", "landed", "step", "step"] * 3, "sent"]
    assert view["alarms"] == []
    text = shown(view)
    for part in ("step 20 of 40, about 10 s left", "no alarms", "2 (<= 2)", "400 B/s", ">=|"):
        assert part in text, part


def partial(folder, out, last=14, period=4):
    """One process, three regions: region 0 takes no part at the steps `out`."""
    records = [header(range(3), 3)]
    for record in steps(range(3), 1, last):
        if record["kind"] != "step":
            continue
        t, record["events"] = record["step"], []
        took = [t not in out, True, True]
        if t % period == 0:
            key = f"0@{t}"
            sent = event("send", t, range(3), key, participants=took)
            stale = [0 if one else -1 for one in took]
            landed = event("land", t, range(3), key, participants=took, staleness=stale)
            record["events"] = [sent, landed]
        records.append(record)
    log(folder, records)
    return folder


def test_a_region_that_takes_no_part_has_nothing_under_way(tmp_path):
    view = Watch(partial(tmp_path / "run", out=(4, 8))).look()
    text = shown(view)
    lanes = [line[5:] for line in text.splitlines() if line.startswith(("   0 ", "   1 "))]
    assert lanes == ["···········#··", "···#···#···#··"], text
    assert view["regions"][0].participation == pytest.approx(1 / 3)


def test_an_empty_timeline_says_why(tmp_path):
    records = [header(range(3), 3), *steps(range(3), 1, 3)]
    for record in records:
        record["bytes_sent"] = [0] * 3
    log(tmp_path / "new", records)
    assert "nothing has been sent yet" in shown(Watch(tmp_path / "new").look())
    end = {"kind": "end", "step": 3, "tokens": 90}
    log(tmp_path / "end", [*records, end | {"bytes_sent": [17] * 3, "bytes_received": [17] * 3}])
    view = Watch(tmp_path / "end").look()
    text = shown(view)
    assert "nothing has been sent" not in text and view["regions"][0].sent == 17
    assert "nothing was sent but the last synchronisation" in text
    log(tmp_path / "long", [header(range(3), 3), *steps(range(3), 1, 12)])
    late = steps(range(3), 13, 90)
    for record in late:
        record["events"] = []
    log(tmp_path / "long", late, step=12)
    assert "no payload was sent in steps 31 to 90" in shown(Watch(tmp_path / "long").look())


def test_only_what_is_new_is_read(run, monkeypatch):
    watch = Watch(run)
    watch.look()
    with (run / "metrics.jsonl").open("a") as file:
        text = "".join(json.dumps(record) + "\n" for record in steps(range(3), 21, 22))
        file.write(text[:-9])
        file.flush()
        assert watch.look()["step"] == 21  # half a line waits
        file.write(text[-9:])
    view = watch.look()
    assert view["step"] == 22 and view["regions"][0].exchanges == 4
    assert view["timeline"]["lanes"][2][-3:] == ["sent", "under way", "landed"]
    log(run, [{"kind": "resume", "step": 10}, *steps(range(3), 11, 12)], step=10)
    view = watch.look()  # the file was replaced: everything is read again
    assert view["step"] == 12 and view["regions"][0].exchanges == 2
    end = {"kind": "end", "step": 12, "tokens": 9, "bytes_sent": [7] * 3, "bytes_received": [8] * 3}
    log(run, [end], step=12)
    view = watch.look()
    assert view["complete"] and view["regions"][2].sent == 7 and view["alarms"] == []


def test_the_loss_is_that_of_the_newest_set(run):
    other = {"kind": "eval_set", "document": [0], "count": [7]}
    log(run, [other], step=20)
    assert Watch(run).look()["eval"]["loss"] == 3.25, "it has not been evaluated yet"
    log(run, [*steps(range(3), 21, 22), evaluation(22, 4.5)], step=20)
    assert Watch(run).look()["eval"]["loss"] == 4.5


def test_separate_jobs_are_one_run(tmp_path):
    watch = Watch(jobs(tmp_path))
    view = watch.look()
    assert view["jobs"] and [row.number for row in view["regions"]] == [0, 1]
    assert view["tokens"] == 400 and view["alarms"] == []
    row = view["regions"][1]
    assert row.travel == 0.25 and row.waited == pytest.approx(3 * 0.5)
    assert (row.participation, row.exchanges) == (1.0, 3)  # landings: the commit says who
    log(
        tmp_path / "region1",
        [{"kind": "end", "step": 20, "tokens": 9, "bytes_sent": [1], "bytes_received": [1]}],
        20,
    )
    assert not watch.look()["complete"]


def growing(here, last):
    """A run of two regions and 40 nominal steps of 20 tokens, whose inner step t has 10 t."""
    records = [header(here, 2) | {"tokens_per_step": 20}, evaluation(0, 5.5)]
    for record in steps(here, 1, last, trainers={"0": {"batch": 1}}):
        if record["kind"] == "step":
            record["tokens"] = 5 * len(here) * record["step"] * (record["step"] + 1) // 2
        records.append(record)
    return records


def test_where_batches_grow_steps_are_nominal(tmp_path):
    log(tmp_path / "run", [*growing(range(2), 10), evaluation(10, 3.0, tokens=550)])
    watch = Watch(tmp_path / "run")
    view = watch.look()
    text = shown(view, width=300)
    assert "nominal step 27 of 40 (inner step 10)" in text and "3.0000 at nominal step 27" in text
    assert (view["done"], view["steps"], view["step"], view["nominal"]) == (27, 40, 10, True)
    assert view["eval"] == {"step": 10, "done": 27, "loss": 3.0}
    log(tmp_path / "run", growing(range(2), 11)[-1:], step=10)
    log(tmp_path / "run", [{"kind": "interval", "step": 11, "steps": 1, "seconds": 5.5}], step=11)
    view = watch.look()
    assert view["left_s"] == pytest.approx((40 - 33) / ((33 - 27.5) / 0.5))
    log(tmp_path / "run", growing(range(2), 13)[-2:], step=11)
    view = watch.look()
    assert view["done"] == 40, "the last step may hold more tokens than are left"


def test_of_one_job_of_several_nominal_steps_follow_from_its_own_tokens(tmp_path):
    for r in range(2):
        log(tmp_path / f"region{r}", growing([r], 10))  # 5, 10, 15, ... tokens
    view = Watch(tmp_path).look()
    assert (view["done"], view["step"], view["tokens"]) == (27, 10, 550)


def test_a_payload_that_the_guard_left_out_does_not_count(tmp_path):
    """The commit record names the region all the same."""

    def spoilt(records):
        for record in records:
            for sent in (e for e in record.get("events", ()) if e["kind"] == "send"):
                sent["left_out"] = [1.0]
        return records

    view = Watch(jobs(tmp_path, changes=spoilt)).look()
    assert [row.participation for row in view["regions"]] == [1.0, 0.0]
    lanes = view["timeline"]["lanes"]
    assert (lanes[0].count("sent"), lanes[0].count("uncounted")) == (4, 0)
    assert (lanes[1].count("sent"), lanes[1].count("uncounted")) == (0, 4)


def without_loss(records):
    records[20]["loss"] = [None]
    return records


def other_anchor(records):
    event = next(e for r in records for e in r.get("events", ()) if e["kind"] == "land")
    event["mean_norm"] = [9.0]
    return records


def other_loss(records):
    return [*records[:-1], evaluation(20, 3.1)]


def not_counted(records):
    for event in (e for r in records for e in r.get("events", ()) if e["kind"] == "land"):
        event["participants"] = [False]
    return records


def cut_off(records):
    return [*records[:-1], evaluation(20, 2.0, behind=7)]


def skipped(records):
    records[18]["skipped"] = [1.0]
    return records


@pytest.mark.parametrize(
    "changes,words",
    [
        (without_loss, "region 1: the loss of step 19 is not finite; the last finite one was"),
        (other_anchor, "anchors apart: regions 0 and 1 landed payload 0@5"),
        (other_loss, "anchors apart: at step 20 that of region 0 has the loss 3.000000"),
        (not_counted, "region 1 took no part in the last 3 exchanges"),
        (cut_off, "region 1 could not reach the others: its anchor is at least 7 steps old"),
        (skipped, "region 1: 1 steps skipped, the last at step 17"),
    ],
)
def test_alarms(tmp_path, changes, words):
    def both(records):
        return changes(records) if changes is not without_loss else changes(records)[:21]

    view = Watch(jobs(tmp_path, changes=both)).look()
    assert len(view["alarms"]) == 1 and view["alarms"][0].startswith(words), view["alarms"]
    assert f"! {words[:40]}" in shown(view)
    if changes is cut_off:
        assert view["eval"]["loss"] == 3.0


@pytest.mark.parametrize("parted", [False, True])
def test_regions_at_a_pace_of_their_own_are_compared_round_by_round(tmp_path, parted):
    """Region 1 is a round ahead: the same keys, which name steps, are other rounds there."""
    for here, ahead in ((0, 0), (1, 1)):
        records = [evaluation(0, 5.5), *steps([here], 1, 20, job=True)]
        lands = [e for r in records for e in r.get("events", ()) if e["kind"] == "land"]
        for number, one in enumerate(lands[:-1], ahead):  # the last one is the last synchronisation
            owner = number % 2
            one |= {"round": number, "admitted": [owner == 0, owner == 1], "participants": [True]}
            one["mean_norm"] = [number + 0.5 * (parted and here)]
        lands[-1]["mean_norm"] = [float(here)]
        log(tmp_path / "run" / f"region{here}", [header([here], 2), *records])
    view = Watch(tmp_path / "run").look()
    words = "anchors apart: regions 0 and 1 landed payload of round 1 with means of other length"
    assert [line.startswith(words) for line in view["alarms"]] == [True] * parted
    shares = [row.participation for row in view["regions"]]
    assert shares == [2 / 3, 2 / 3], "of two rounds and the last synchronisation"
    sent = [
        [marks[step - 1] for step in (5, 10, 15, 20)]
        for marks in view["timeline"]["lanes"].values()
    ]
    wanted = ["sent", "uncounted", "sent", "sent"]
    assert sent == [wanted, wanted], "a round of its own, one of the other"


def test_a_run_that_has_just_begun_is_no_alarm(tmp_path):
    log(tmp_path / "run", [header(range(3), 3), evaluation(0, 5.5)])
    assert Watch(tmp_path / "run").look()["alarms"] == []


def test_no_number_is_cut_off_in_a_narrow_terminal(run):
    view = Watch(run, uniform(3, 1.0, delay_s=0.001, compute_s=0.1)).look()
    for row in view["regions"]:
        row.step, row.loss, row.sent, row.received = 123_456, 12.3456, 4.05e12, 4.05e12
        row.rate, row.link, row.staleness, row.stalest = 3.37e5, 1.1e-5, 5, 5
    lines = shown(view, width=80)
    assert "\u2026" not in lines
    for cell in ("region", "123,456", "12.3456", "5 (<= 5)", "4.05 TB", "337 kB/s", "0.0011%"):
        assert cell in lines, lines


def test_a_region_behind_and_a_run_that_stands_still(tmp_path):
    watch = Watch(jobs(tmp_path, ends=(40, 18)))
    assert watch.look()["alarms"] == ["region 1 is 22 steps behind the first"]
    later = time.time() + 1000
    assert any("the run stands still, or was ended" in line for line in watch.look(later)["alarms"])
    one = tmp_path / "alone"
    log(one / "region0", [header([0], 2), *steps([0], 1, 3, job=True)])
    assert Watch(one).look()["alarms"] == ["1 of 2 regions have not begun"]


def test_the_virtual_clock_gives_link_use(run):
    # 4 x 1000 bytes twice over 3 regions in 20 steps of 0.1 s, over two links of 1 Gbit/s.
    network = uniform(3, 1.0, delay_s=0.001, compute_s=0.1)
    view = Watch(run, network).look()
    for row in view["regions"]:
        sent = 4 * 1000 * 2 * 2 / 3
        assert row.link == pytest.approx(sent * 8 / 1e9 / (20 * 0.1) / 2, rel=0.02)
        assert row.waiting == pytest.approx(0.0, abs=0.01)
    with pytest.raises(RefusedError, match="watch"):
        Watch(run, uniform(2, 1.0)).look()


def test_a_single_region_has_no_way_out(tmp_path):
    log(tmp_path / "run", [header([0], 1), *steps([0], 1, 10)])
    network = parse({"regions": 1, "bandwidth_gbps": 1.0, "delay_ms": 1.0, "compute_s": 0.1})
    view = Watch(tmp_path / "run", network).look()
    assert view["regions"][0].link is None and view["regions"][0].waiting == 0.0


def test_the_command(run, capsys, tmp_path):
    assert command(["watch", str(run), "--once"]) == 0
    assert "no alarms" in capsys.readouterr().out
    assert command(["watch", str(tmp_path / "nothing")]) == 2
    assert "no run lies there yet" in capsys.readouterr().err
    assert command(["watch", "--port=99999", "--every=0"]) == 2
    said = capsys.readouterr().err
    for part in ("which run?", "--port=99999", "--every=0.0"):
        assert part in said


@pytest.fixture
def server(run):
    served = Server(Watch(run), 0, 3.0)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


def ask(server, path="", host=None):
    request = urllib.request.Request(server.url + path, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode(), answer.headers


def test_the_server_answers_this_machine_alone(server, run):
    assert server.server_address[0] == "127.0.0.1"
    text, headers = ask(server)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Refresh"] == "3"  # a browser requests it again
    assert not re.search(r"https?://", text)
    for path, host, code in (("other", None, 404), ("", "evil.example:80", 403)):
        with pytest.raises(urllib.error.HTTPError) as error:
            ask(server, path, host)
        assert error.value.code == code
    with pytest.raises(RefusedError, match="watch"):
        Server(Watch(run), server.server_address[1], 1.0)
    (run / "metrics.jsonl").write_text("no record\n")
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(server)
    assert error.value.code == 500 and "not a JSON record" in error.value.read().decode()


def test_the_page_is_the_report_made_anew(server, run):
    text = html.unescape(ask(server)[0])
    for part in (
        "made up, 3 regions, one process, corpus <text>",
        "step 20 of 40, about 10 s left",
        "eval loss of the anchor 3.2500 at step 20",
        "No alarms.",
        "loss against tokens",
    ):
        assert part in text, part
    more = steps(range(3), 21, 22)
    more[-1]["loss"][1] = float("nan")
    log(run, more, step=20)
    text = html.unescape(ask(server)[0])
    assert "step 22 of 40" in text
    assert "Alarm: region 1: the loss of step 22 is not finite" in text


def test_the_page_waits_for_a_run_that_has_not_begun_and_for_its_first_step(tmp_path):
    with Server(Watch(tmp_path / "later"), 0, 1.0) as served:
        with pytest.raises(RefusedError, match="no run lies there yet"):
            served.page()
        log(tmp_path / "later", [header(range(3), 3)])
        with pytest.raises(RefusedError, match="has made no step yet"):
            served.page()
        log(tmp_path / "later", steps(range(3), 1, 20), step=0)
        assert "step 20 of 40" in html.unescape(served.page())


def test_the_page_has_the_runs_own_network(tmp_path):
    here = range(3)
    records = [header(here, 3, "aws:Oregon,Virginia,Tokyo"), *steps(here, 1, 20)]
    log(tmp_path / "run", [*records, evaluation(20, 3.25)])
    with Server(Watch(tmp_path / "run"), 0, 1.0) as served:
        text = served.page()
    assert "On the network aws:Oregon,Virginia,Tokyo" in text and "timeline of" in text
