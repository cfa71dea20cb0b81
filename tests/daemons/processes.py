"""The two daemons as a person starts them: processes, sockets and files.  Waits have deadlines, and none is an assertion on speed.

Each daemon runs this checkout's code.  It sees no git, so that a commit made while a test runs is no other code version."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common import metrics
from producer import prompt_sets, prompts as prompt_files
from producer.daemon import SALT, SHIPPED

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0             # seconds until a wait has failed, on a box where others work too
PROMPTS = 60                 # of the shipped ones: a stream of some seconds
SERVE = ["--target", "embedded", "--layers", "1,3", "--batch", "4", "--max-new-tokens", "24", "--eval-prompts", "1", "--eval-new-tokens", "8",
         "--threads", "1"]
RUN = ["--sequences", "2", "--anchors", "4", "--layers", "1", "--block-size", "4", "--threads", "1"]
ENTRY = {"hsprod": "producer", "hstrain": "trainer"}


class Daemon:
    """One process; its log goes to a file of its own, or goes on in that of an earlier start."""

    def __init__(self, command: str, *words: str, log: Path, prefix: Sequence[str] = ()) -> None:
        """prefix: a command that becomes this one, such as nsenter."""
        self.name, self.log, self._from = f"{command} ({log.name})", log, log.stat().st_size if log.exists() else 0
        code = f"from {ENTRY[command]}.cli import main; main()"
        home = {"XDG_STATE_HOME": str(log.parent), "GIT_DIR": os.devnull, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        with log.open("ab") as file:
            self.process = subprocess.Popen([*prefix, sys.executable, "-c", code, *words], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                                            env=os.environ | home)

    @property
    def text(self) -> str:
        """What this start has logged."""
        return self.log.read_bytes()[self._from:].decode(errors="replace")

    def says(self, words: str) -> None:
        self.until(lambda: words in self.text, f"it says {words!r}")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait; the daemon has to live meanwhile."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode} before {what}\n{self.text}"
            assert time.monotonic() < end, f"{self.name}: waited {PATIENCE:.0f} s in vain until {what}\n{self.text}"
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; its exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait for its own end; its exit code."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end\n{self.text}") from None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def some_prompts(folder: Path) -> tuple[Path, prompt_files.Split]:
    """The first of the shipped prompts as a file, and how they are split."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(SHIPPED.read_text("utf-8").splitlines(keepends=True)[:PROMPTS]), "utf-8")
    return path, prompt_files.split(prompt_sets.read(path).prompts, 0.1, SALT)


def stored(state: Path) -> list[int]:
    """Sequence numbers in a box's store, the trainer's or the producer's, as the folder lists them."""
    return sorted(int(path.stem) for path in state.glob("**/*.hs"))


def rows(run: Path) -> dict[int, int]:
    """{step: tokens trained on so far}: which samples were read, in which order, as each has a length of its own."""
    return {row["step"]: row["tokens"] for row in metrics.read(run / "metrics.jsonl", "step")}
