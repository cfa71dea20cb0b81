"""A view that a full disk cannot turn into an end; rates; the journal's priorities; the watchdog's beat."""
import errno
import io
import json
import logging
import os
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from common import exporter, logs, service, status
from common.status import Board, Rate
from producer import seen as producer_seen
from trainer import seen as trainer_seen


def test_a_full_disk_costs_the_view_and_is_counted_and_said(tmp_path, monkeypatch, caplog):
    board = Board(tmp_path / "status.json")
    board.show({"doing": "a"}, 100.0)
    def full(self, *_a, **_k):
        raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(status.Path, "write_text", full)
        for second in range(101, 131):
            board.show({"doing": "b"}, float(second))
    assert board.failures == 30 and caplog.text.count("No space left on device") == 1
    assert json.loads((tmp_path / "status.json").read_text())["doing"] == "a" and [p.name for p in tmp_path.iterdir()] == ["status.json"]
    board.show({"doing": "c"}, 131.0)
    shown = status.read(tmp_path / "status.json", 131.0)
    assert (shown["doing"], shown["unwritten_status"], shown["running"]) == ("c", 30, True)
    assert ("this view", "could not be written 30 times") in status.troubles(shown, 131.0)


def test_a_clock_that_was_set_back_does_not_silence_the_view(tmp_path):
    board = Board(tmp_path / "status.json")
    board.show({"doing": "later"}, 5000.0)
    board.show({"doing": "too soon"}, 5000.5)
    assert board.values["doing"] == "later"
    board.show({"doing": "earlier"}, 1000.0)
    assert board.values["doing"] == "earlier"


def test_a_process_that_is_gone_is_not_running(tmp_path):
    board = Board(tmp_path / "status.json")
    board.show({"doing": "a"}, 1.0)
    values = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(values | {"started": "1"}))
    assert not status.read(tmp_path / "status.json", 2.0)["running"]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 1000)), min_size=1, max_size=40))
def test_a_rate_is_growth_over_the_last_minute(steps):
    rate, now, total, seen = Rate(), 0.0, 0, []
    for seconds, grown in steps:
        now, total = now + seconds, total + grown
        seen.append((now, total))
        told = rate(total, now)
    then, before = max((s for s in seen if now - s[0] >= status.RATE_OVER), default=seen[0])
    assert told == ((total - before) / (now - then) if now > then else 0.0)


@pytest.mark.parametrize("level, number", [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 2)])
def test_every_line_in_the_journal_has_its_priority(level, number):
    record = logging.LogRecord("link", level, __file__, 1, "two\nlines", (), None)
    assert logs.ForJournal().format(record) == f"<{number}>link: two\n<{number}>lines"


def test_the_journal_is_known_by_its_own_stream_alone(monkeypatch):
    here = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{here.st_dev}:{here.st_ino}")
    assert logs.in_journal() and logs.prefix(logging.ERROR) == "<3>"
    monkeypatch.setenv("JOURNAL_STREAM", f"{here.st_dev}:{here.st_ino + 1}")
    assert not logs.in_journal() and logs.prefix(logging.ERROR) == ""


def test_the_last_trouble_is_kept_and_counted():
    trouble = logs.Trouble()
    log = logging.Logger("x")
    log.addHandler(trouble)
    log.info("nothing")
    log.warning("first")
    log.error("second %d", 2)
    assert trouble.counts == {"warning": 1, "error": 1} and (trouble.last["level"], trouble.last["text"]) == ("error", "x: second 2")


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """What systemd hears."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setattr(service, "threads", service.Threads())
        monkeypatch.setattr(service, "_beaten", 0.0)
        def heard() -> list[str]:
            found = []
            while True:
                try:
                    found.append(sock.recv(4096).decode())
                except BlockingIOError:
                    return found
        yield heard


def test_a_beat_a_second_however_often_the_loop_turns(systemd):
    for _ in range(1000):
        service.beat()
    assert len(systemd()) < 10


def test_a_thread_that_stands_still_keeps_the_beat_back_and_its_next_turn_gives_it_again(systemd, caplog):
    now = time.monotonic()
    service.threads.turned("link", now - service.STILL - 1)
    service.notify(STATUS="training", WATCHDOG="1")
    assert systemd() == ["STATUS=training"] and "link: no turn for more than" in caplog.text
    service.threads.turned("link", time.monotonic())
    service.notify(STATUS="two\nlines", WATCHDOG="1")
    assert systemd() == ["STATUS=two lines\nWATCHDOG=1"]
    service.threads.turned("link", now - service.STILL - 1)
    service.threads.ended("link")
    service.notify(WATCHDOG="1")
    assert systemd() == ["WATCHDOG=1"]


def test_a_long_start_asks_for_its_time(systemd):
    service.starting("reading the target", 60.0)
    assert systemd() == ["STATUS=reading the target\nEXTEND_TIMEOUT_USEC=60000000"]


def test_a_socket_that_is_gone_ends_no_daemon(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    service.notify(READY="1")
    assert "No such file" in caplog.text


PRODUCER = {"doing": "answering prompts", "address": "tcp://10.0.0.1:5757", "last_evaluation": "ce-s0 step 500: tau 3.1",
            "numbers": {n.name: 1 for n in producer_seen.NUMBERS} | {"first_sample": 10, "next_sample": 42, "disk_used_bytes": 5e9, "disk_budget_bytes": 5e10},
            "counters": {"refused": 2, "tokens": 9}, "troubles": {"warning": 3}, "written_at": 1000.0, "unwritten_status": 0,
            "last_trouble": {"at": 940.0, "level": "warning", "text": "link: [bold]cut[/bold]"},
            "trainers": {"box": {"connected": True, "follower": False, "acked": 40, "lag": 1, "lag_bytes": 10, "sole_bytes": 0, "credit": 10 ** 6,
                                 "last_seen_s": 0.1, "away_s": None},
                         "old": {"connected": False, "follower": False, "acked": 9, "lag": 32, "lag_bytes": 5 * 10 ** 9, "sole_bytes": 4 * 10 ** 9,
                                 "credit": 0, "last_seen_s": None, "away_s": 3 * 86400.0}}}
TRAINER = {"doing": "training", "run": "/r", "run_name": "r", "arm": "ce_causal", "numbers": {n.name: 1 for n in trainer_seen.NUMBERS},
           "stream": "receiving", "acceptance": "tau 3.1", "counters": {"rows cut": 4}, "troubles": {}, "written_at": 1000.0, "unwritten_status": 0}


def drawn(values: dict, rows, tmp_path) -> str:
    (tmp_path / "s.json").write_text(json.dumps(values | {"pid": 0, "started": ""}))
    console = Console(file=io.StringIO(), width=140)
    console.print(status.screen([tmp_path / "s.json"], "hsprod serve", rows, 1000.0))
    return console.file.getvalue()


def test_the_producers_screen_names_who_holds_up_what_and_the_command_that_releases_it(tmp_path):
    text = drawn(PRODUCER, producer_seen.rows, tmp_path)
    for says in ("samples 10 to 41 kept", "5.0 GB of 50.0 GB (10%)", "was connected, 1 samples behind, credit 1.0 MB", "away for 3.0 d, 32 samples behind",
                 "5.0 GB are kept, 4.0 GB of them for it alone", "hsprod forget old", "refused 2", "1 min ago", "link: [bold]cut[/bold]"):
        assert says in " ".join(text.split()).replace("│ ", "").replace(" │", "") or says in text, (says, text)
    assert "forget box" not in text and "tokens 9" not in text


def test_a_short_absence_is_no_reason_to_forget_and_a_producer_that_is_down_knows_of_before():
    old = PRODUCER["trainers"]["old"]
    for away, advised in ((60.0, False), (3599.0, False), (3600.0, True), (None, True)):
        assert ("hsprod forget old" in producer_seen.trainer("old", old | {"away_s": away}, True)) == advised
    box = PRODUCER["trainers"]["box"]
    assert producer_seen.trainer("box", box, False).startswith("was connected") and producer_seen.trainer("box", box, True).startswith("connected")


def test_the_trainers_screen(tmp_path):
    text = drawn(TRAINER, trainer_seen.rows, tmp_path)
    for says in ("ce_causal", "1 of 1 (100%)", "loss", "tau 3.1", "rows cut 4"):
        assert says in text, text
    assert "connected, 1 samples behind" not in text, "it is not running"
    assert ("link", "connected, 1 samples behind, 0.00 MB/s, credit 1 B") in trainer_seen.rows(TRAINER | {"running": True}, 1000.0)


@pytest.mark.parametrize("values, seen", [(PRODUCER, producer_seen.SEEN), (TRAINER, trainer_seen.SEEN)])
def test_prometheus_is_told_the_same_numbers(values, seen, tmp_path):
    client = pytest.importorskip("prometheus_client")
    board = Board(tmp_path / "s.json")
    board.values = values
    registry = client.CollectorRegistry()
    registry.register(exporter.Collector(board, seen))
    text = client.generate_latest(registry).decode()
    for number in seen.numbers:
        assert f"{seen.prefix}_{number.name}{'_total' if number.kind == 'counter' else ''}" in text
    labels = {"arm": values.get("arm"), "run_name": values.get("run_name")} if seen.labels else {}
    assert registry.get_sample_value(f"{seen.prefix}_disk_budget_bytes", labels) == values["numbers"]["disk_budget_bytes"]
    if seen is producer_seen.SEEN:
        assert registry.get_sample_value("hsprod_trainer_sole_bytes", {"trainer": "old"}) == 4e9
        assert registry.get_sample_value("hsprod_trainer_away_s", {"trainer": "box"}) is None
        assert registry.get_sample_value("hsprod_events_total", {"event": "refused"}) == 2
    else:
        assert registry.get_sample_value("hstrain_events_total", labels | {"event": "rows_cut"}) == 4
