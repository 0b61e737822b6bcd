"""What is done beside a region: its records are not those of the run, and cost it nothing."""

import socket
import threading

import pytest

from experiments.faults.fault import Fault
from experiments.faults.strangers import EVERY_SECONDS, Strangers
from lowcomm_jax.store.commits import CommitLog, Job
from lowcomm_jax.store.kv import MetricsCounter, Store
from lowcomm_jax.store.records import Beat
from lowcomm_jax.store.secret import Seal
from lowcomm_jax.store.slots import Slots


@pytest.fixture
def meeting(tmp_path):
    """A folder with a run of which exchange 7 of epoch 1 has a record."""
    folder = tmp_path / "meet" / "run"
    (folder / "round" / "1" / "7").mkdir(parents=True)
    (folder / "round" / "1" / "7" / "commit.0").write_text("{}")
    (folder / "born" / "0").mkdir(parents=True)
    for incarnation in (2, 10):
        (folder / "born" / "0" / f"{incarnation}.0").write_text("taken")
    return tmp_path / "meet"


@pytest.mark.parametrize("kind", ["stranger", "version"])
def test_records_that_exchanges_will_find_are_rejected(kind, meeting):
    Strangers(meeting).act([Fault(1, kind, 0, steps=9)])
    counter = MetricsCounter()
    store = Store(f"file://{meeting}", "run", counter)
    log = CommitLog(store, Slots(store, Seal("run", b"")))
    job = Job(0, 10)
    assert store.read("round/1/8/announce.0.10.0") and not log.announced("1/8", {0: [10]})
    assert store.read("round/1/9/confirm.0.10.0") and not log.confirmed("1/9", [job])
    number = 8 if kind == "stranger" else 9
    assert store.read(f"round/1/{number}/commit.0") and log.committed(f"1/{number}") is None
    assert counter.read()["rejected_record"] >= 3


def test_what_stands_there_already_stays(meeting):
    path = meeting / "run" / "round" / "1" / "8" / "announce.0.10.0"
    path.parent.mkdir(parents=True)
    path.write_text("ours")
    Strangers(meeting).act([Fault(1, "stranger", 0, steps=9)])
    assert path.read_text() == "ours"


def test_nothing_is_written_while_the_folder_is_away_or_too_often(tmp_path, meeting):
    strangers, fault = Strangers(tmp_path / "nowhere"), Fault(1, "stranger", 0, steps=9)
    strangers.act([fault])
    assert not (tmp_path / "nowhere").exists()
    strangers = Strangers(meeting)
    strangers.act([fault])

    def written():
        return {path: path.read_bytes() for path in meeting.rglob("*") if path.is_file()}

    before = written()
    assert EVERY_SECONDS > 0.1
    strangers.act([fault])
    assert written() == before


def test_a_stranger_knocks_at_the_port_that_a_heartbeat_names(meeting):
    with socket.create_server(("127.0.0.1", 0)) as server:
        got = []

        def listen():
            with server.accept()[0] as one:
                got.append(one.recv(99))

        thread = threading.Thread(target=listen)
        thread.start()
        port = server.getsockname()[1]
        beat = Beat(1, address=f"https://127.0.0.1:{port}")
        (meeting / "run" / "beat").mkdir()
        (meeting / "run" / "beat" / "0").write_bytes(Seal("run", b"").close("beat/0", beat))
        Strangers(meeting).act([Fault(1, "stranger", 0, steps=9)])
        thread.join(5)
    assert got and got[0]
