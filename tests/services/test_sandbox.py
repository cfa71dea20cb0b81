"""Both daemons do their whole work with no other system calls and sockets than their units allow."""
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemons.processes import ENTRY, PATIENCE, ROOT, RUN, SERVE, free_port, some_prompts
from tests.services import sandbox

pytestmark = [pytest.mark.processes,
              pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here (apt install systemd): its sets of system calls are not known")]
TRIED = """
import os, socket
for what, call in (("raw packets", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)), ("another user", lambda: os.setuid(0)), ("another root", lambda: os.chroot("/"))):
    try:
        call()
        print(what)
    except PermissionError:
        pass
"""


def begin(unit: str, *command: str, **over) -> subprocess.Popen:
    words = [sys.executable, sandbox.__file__, str(ROOT / "systemd" / unit), *command]
    return subprocess.Popen(words, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "GIT_DIR": os.devnull}, **over)


@pytest.mark.parametrize("unit", ["hsprod.service", "hstrain@.service"])
def test_the_filter_does_hold_something_back(unit):
    said, _ = begin(unit, sys.executable, "-c", TRIED, stdout=subprocess.PIPE).communicate(timeout=60)
    assert said == ""


def test_a_stream_a_run_and_an_evaluation_inside_it(tmp_path: Path):
    prompts, _ = some_prompts(tmp_path)
    address = f"tcp://127.0.0.1:{free_port()}"
    commands = {"hsprod": ("hsprod.service", ["serve", *SERVE, "--prompts", str(prompts), "--bind", address, "--state-dir", str(tmp_path / "p")]),
                "hstrain": ("hstrain@.service", ["run", *RUN, "--producer", address, "--steps", "6", "--eval-every", "6", "--state-dir", str(tmp_path / "t")])}
    logs = {name: (tmp_path / f"{name}.log").open("w+") for name in commands}
    daemons = {name: begin(unit, sys.executable, "-c", f"from {ENTRY[name]}.cli import main; main()", *words, stdout=logs[name])
               for name, (unit, words) in commands.items()}
    try:
        code = daemons["hstrain"].wait(PATIENCE)
        daemons["hsprod"].send_signal(signal.SIGTERM)
        assert (code, daemons["hsprod"].wait(PATIENCE)) == (0, 0), {name: (tmp_path / f"{name}.log").read_text()[-2000:] for name in logs}
    finally:
        for name in commands:
            daemons[name].kill()
            daemons[name].wait()
            logs[name].close()
    assert "tau" in (tmp_path / "hstrain.log").read_text()
