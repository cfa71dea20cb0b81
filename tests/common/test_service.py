"""Signals: at once while nothing is in hand, a flag afterwards, at once on the second."""
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.service import Stop, Stopped

SETUP = "import os, signal, sys; from common.service import Stop; stop = Stop(); stop.on_signals(); "


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", SETUP + code], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_signals(number):
    send = f"os.kill(os.getpid(), signal.{number}); "
    before = run(send + "print('still here')")
    assert (before.returncode, before.stdout) == (0, "")
    once = run(f"stop.begin(); {send} print('flag', bool(stop), stop.wait(60)); sys.exit(3)")
    assert (once.returncode, once.stdout) == (3, "flag True True\n")
    twice = run(f"stop.begin(); {send} {send} print('still here')")
    assert (twice.returncode, twice.stdout) == (128 + getattr(signal, number), "")


def test_check_raises_once_it_is_set():
    stop = Stop()
    stop.check()
    stop.set()
    with pytest.raises(Stopped):
        stop.check()
