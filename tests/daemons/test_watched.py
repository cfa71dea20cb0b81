"""Both daemons as systemd and Prometheus see them: READY once they can be used, a beat out of every kind of work, numbers that move."""
import json
import socket
import threading
import time
import urllib.request

import pytest

from common import status
from tests.daemons.processes import RUN, SERVE, free_port, some_prompts

pytestmark = pytest.mark.processes
LATE = 5.0                   # seconds for this process to read what a daemon has said


class Systemd:
    """What one daemon says on its notify socket, read as it comes."""

    def __init__(self, path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(path))
        self.said: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            self.said += self._sock.recv(65536).decode().splitlines()

    def heard(self, words: str) -> bool:
        """Whether it was said; what was said a moment ago may not be read yet."""
        end = time.monotonic() + LATE
        while not any(words in line for line in list(self.said)):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0].partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_two_services_as_they_are_watched(tmp_path, start, monkeypatch):
    pytest.importorskip("prometheus_client")
    path, _ = some_prompts(tmp_path)
    address, ports = f"tcp://127.0.0.1:{free_port()}", (free_port(), free_port())
    heard = {name: Systemd(tmp_path / f"{name}.sock") for name in ("p", "t")}
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "p.sock"))
    producer = start("hsprod", "serve", *SERVE, "--prompts", path, "--bind", address, "--state-dir", tmp_path / "p", "--metrics-port", ports[0], log="p")
    producer.until(lambda: heard["p"].heard("READY=1"), "READY")
    before = heard["p"].said[:heard["p"].said.index("READY=1")]
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in before) and "WATCHDOG=1" not in before
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "t.sock"))
    trainer = start("hstrain", "run", *RUN, "--producer", address, "--steps", 40, "--eval-every", 40, "--state-dir", tmp_path / "t", "--name", "box",
                    "--metrics-port", ports[1], log="t")
    trainer.until(lambda: heard["t"].heard("READY=1"), "READY")
    trainer.until(lambda: metrics(ports[1]).get("hstrain_step", 0) > 5, "steps are exported")
    producer.until(lambda: metrics(ports[0]).get("hsprod_next_sample", 0) > 5, "samples are exported")
    shown = metrics(ports[0])
    assert shown["hsprod_trainer_connected"] == 1 and shown["hsprod_ratio"] > 1 and shown["hsprod_disk_budget_bytes"] == 50e9
    assert trainer.ended() == 0, trainer.text
    for name, words in (("p", "WATCHDOG=1"), ("t", "WATCHDOG=1"), ("p", "STATUS=evaluating"), ("t", "STATUS=training")):
        assert heard[name].heard(words), (name, words, heard[name].said[-5:])
    view = tmp_path / "p" / "status.json"
    producer.until(lambda: json.loads(view.read_text())["numbers"]["evaluations"] == 1, "the evaluation is shown")
    producer.until(lambda: not json.loads(view.read_text())["trainers"]["box"]["connected"], "the trainer is shown as away")
    said = status.read(view, time.time())
    assert said["running"] and said["numbers"]["tau"] >= 1 and said["trainers"]["box"]["away_s"] >= 0
    assert producer.stop() == 0 and heard["p"].heard("STOPPING=1")
    assert not status.read(view, time.time())["running"]
    [view] = (tmp_path / "t" / "status").glob("*.json")
    told = json.loads(view.read_text())
    assert told["numbers"]["step"] == 40 and told["arm"].startswith("ce_causal") and told["numbers"]["tau"] == said["numbers"]["tau"]
