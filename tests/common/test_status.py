"""A view that a full disk cannot turn into an end; what it says of a daemon in each state; rates; the journal's priorities; the
watchdog's beat."""
import errno
import io
import json
import logging
import os
import socket
import threading
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
    log.warning("third")
    assert trouble.counts == {"warning": 2, "error": 1}
    assert {level: last["text"] for level, last in trouble.last.items()} == {"error": "x: second 2", "warning": "x: third"}


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


def test_a_systemd_that_does_not_read_stops_no_loop(systemd, caplog):
    """A queue on its socket holds ten lines (net.unix.max_dgram_qlen); the trainer stood there for good, its loop in the middle of a word."""
    loop = threading.Thread(target=lambda: [service.notify(STATUS="training", WATCHDOG="1") for _ in range(600)], daemon=True)
    loop.start()
    loop.join(60)
    assert not loop.is_alive() and len(systemd()) < 600 and "temporarily unavailable" in caplog.text
    service.notify(STATUS="goes on")
    assert systemd() == ["STATUS=goes on"]


def test_a_thread_that_stands_still_is_said_once(systemd, caplog):
    service.threads.turned("link", time.monotonic() - service.STILL - 1)
    for _ in range(3):
        service.notify(WATCHDOG="1")
    assert systemd() == [] and caplog.text.count("no turn for more than") == 1
    service.threads.turned("link", time.monotonic())
    service.notify(WATCHDOG="1")
    service.threads.turned("link", time.monotonic() - service.STILL - 1)
    service.notify(WATCHDOG="1")
    assert systemd() == ["WATCHDOG=1"] and caplog.text.count("no turn for more than") == 2


def test_long_work_says_where_it_is_and_gives_its_beats(systemd):
    stop, seen = service.Stop(), []
    stop.turn = lambda: seen.append("a turn")
    stop.check()
    stop.set()
    with pytest.raises(service.Stopped):
        stop.check()
    assert seen == ["a turn"] * 2 and systemd() == ["WATCHDOG=1"]


PRODUCER = {"doing": "answering prompts", "address": "tcp://10.0.0.1:5757", "last_evaluation": "ce-s0 step 500: tau 3.1",
            "numbers": {n.name: 1 for n in producer_seen.NUMBERS} | {"first_sample": 10, "next_sample": 42, "disk_used_bytes": 5e9,
                                                                     "disk_budget_bytes": 5e10},
            "counters": {"refused": 2, "captures_too_long": 9, "malformed": 0}, "troubles": {"warning": 3, "error": 1}, "written_at": 1000.0,
            "unwritten_status": 0, "last": {"warning": {"at": 940.0, "text": "link: [bold]cut[/bold]"}, "error": {"at": 400.0, "text": "disk: full"}},
            "trainers": {"box": {"connected": True, "follower": False, "acked": 40, "lag": 1, "lag_bytes": 10, "sole_bytes": 0, "credit": 10 ** 6,
                                 "last_seen_s": 0.1, "away_s": None},
                         "old": {"connected": False, "follower": False, "acked": 9, "lag": 32, "lag_bytes": 5 * 10 ** 9, "sole_bytes": 4 * 10 ** 9,
                                 "credit": 0, "last_seen_s": None, "away_s": 3 * 86400.0}}}
TRAINER = {"doing": "training", "run": "/r", "run_name": "r", "arm": "ce_causal", "numbers": {n.name: 1 for n in trainer_seen.NUMBERS},
           "stream": "receiving", "acceptance": "tau 3.1", "counters": {"rows_cut": 4}, "troubles": {}, "written_at": 1000.0, "unwritten_status": 0}
HERE = {"pid": os.getpid(), "started": status._started(os.getpid())}
GONE = {"pid": os.getpid(), "started": "1"}


def drawn(values: dict, rows, tmp_path, now: float = 1000.0, width: int = 140, **more: dict) -> str:
    """The screen of s.json, and of the other files that are named."""
    for name, content in {"s": values, **more}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(GONE | content))
    console = Console(file=io.StringIO(), width=width)
    console.print(status.screen(sorted(tmp_path.glob("*.json")), "hsprod serve", rows, now))
    return console.file.getvalue()


def words(text: str) -> str:
    """Without the table's lines, so that what was wrapped is whole again."""
    return " ".join(text.translate({ord(c): " " for c in "│┌┐└┘─┬┴"}).split())


def test_the_producers_screen_names_who_holds_up_what_and_the_command_that_releases_it(tmp_path):
    for width in (80, 120, 140):
        text = words(drawn(PRODUCER, producer_seen.rows, tmp_path, width=width))
        for says in ("samples 10 to 41 kept", "5.0 GB of 50.0 GB (10%)", "away for 3.0 d, 32 samples behind", "forget old", "2 connections refused",
                     "9 answers left out: longer than", "last warning 1 min ago, of 3 since", "link: [bold]cut[/bold]", "last error 10 min ago, of 1 "):
            assert says in text, (says, text)
        assert "forget box" not in text and "links dropped" not in text
    assert "4.0 GB of them for it alone. Never to come back? hsprod forget old" in text


def test_what_is_of_now_is_shown_only_while_it_runs(tmp_path):
    live, gone = drawn(PRODUCER | HERE, producer_seen.rows, tmp_path), drawn(PRODUCER, producer_seen.rows, tmp_path)
    assert "MB/s" in live and "connected, 1 sample" in live and "MB/s" not in gone and "was connected, 1 sample" in gone
    live, gone = drawn(TRAINER | HERE, trainer_seen.rows, tmp_path), drawn(TRAINER, trainer_seen.rows, tmp_path)
    assert "steps/s" in live and "credit 1 B" in live and "steps/s" not in gone and "credit" not in gone


@pytest.mark.parametrize("values, age, title, what", [
    (HERE, 3.0, "running, last word 3 s ago", "doing"), (HERE, 120.0, "running, last word 2 min ago", "doing"),
    (HERE, 121.0, "running, but silent for 2 min: at one long piece of work, or stuck", "doing"),
    (GONE, 60.0, "not running: it was killed or failed 1 min ago, see its log", "was doing"),
    (GONE | {"ended": True}, 60.0, "ended 1 min ago", "doing"), (HERE | {"ended": True}, 0.0, "running, last word 0 s ago", "doing")])
def test_a_daemon_that_runs_hangs_was_killed_or_is_done(values, age, title, what, tmp_path):
    text = drawn(PRODUCER | values, producer_seen.rows, tmp_path, 1000.0 + age)
    assert f"hsprod serve: {title} " in text.splitlines()[0] and f"│ {what} " in text


def test_a_start_has_a_screen_before_there_is_a_number(tmp_path):
    start = {"doing": "starting: reading the target", "written_at": 1000.0, "numbers": {}, "troubles": {}, "last": {}, "unwritten_status": 0}
    text = drawn(start | HERE, producer_seen.rows, tmp_path)
    assert "starting: reading the target" in text and "none has joined" not in text and "stream" not in text
    assert list(exporter.families(start, producer_seen.SEEN))


def test_runs_that_are_over_take_one_line_each_and_a_spoilt_file_hides_no_other(tmp_path):
    over = {f"r{i:02}": TRAINER | {"ended": True, "doing": "done", "written_at": 900.0 - i} for i in range(12)}
    text = drawn(TRAINER | HERE, trainer_seen.rows, tmp_path, **over, zz={"pid": 0})
    assert text.count("loss") == 1 and "r00: ended 2 min ago; done" in text and "r09" in text and "r10" not in text and "and 2 more" in text
    assert "zz.json is damaged" in " ".join(text.split())
    (tmp_path / "s.json").unlink()
    text = drawn(over["r00"], trainer_seen.rows, tmp_path)
    assert text.count("loss") == 1, "nothing runs: the one that ended last is shown whole"


def test_watching_ends_with_ctrl_c_and_json_is_one_line_a_look(tmp_path, monkeypatch, capsys):
    drawn(PRODUCER, producer_seen.rows, tmp_path)
    looks = []
    def sleep(_seconds):
        looks.append(1)
        if len(looks) == 3:
            raise KeyboardInterrupt
    monkeypatch.setattr(status.time, "sleep", sleep)
    status.show(lambda: [tmp_path / "s.json"], "hsprod serve", producer_seen.rows, as_json=True, watch=True)
    assert [json.loads(line)[0]["doing"] for line in capsys.readouterr().out.splitlines()] == ["answering prompts"] * 3


def test_a_short_absence_is_no_reason_to_forget_and_a_producer_that_is_down_knows_of_before():
    old = PRODUCER["trainers"]["old"]
    for away, advised in ((60.0, False), (3599.0, False), (3600.0, True), (None, True)):
        assert ("hsprod forget old" in producer_seen.trainer("old", old | {"away_s": away}, True)) == advised
    box = PRODUCER["trainers"]["box"]
    assert producer_seen.trainer("box", box, False).startswith("was connected") and producer_seen.trainer("box", box, True).startswith("connected")


def test_the_trainers_screen(tmp_path):
    text = drawn(TRAINER | HERE, trainer_seen.rows, tmp_path)
    for says in ("ce_causal", "1 of 1 (100%)", "loss", "tau 3.1", "4 tokens left out", "connected, 1 sample behind, 0.00 MB/s, credit 1 B"):
        assert says in text, text


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
        assert registry.get_sample_value("hsprod_events_total", {"event": "forgotten"}) == 0, "what has not happened is there to be watched"
        assert registry.get_sample_value("hsprod_troubles_total", {"level": "error"}) == 1
    else:
        assert registry.get_sample_value("hstrain_events_total", labels | {"event": "rows_cut"}) == 4
