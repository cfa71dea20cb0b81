"""Another project's code in a Python of its own, asked step by step, so that both sides can take turns in one run.

Its pins exclude what ours needs (speculators 0.9.0: transformers up to 5.19), so it cannot be imported beside ours.  Here:
the environment, made once in the cache folder; a process in it that answers lines of JSON; what a process has resident.
Standard library only, because both Pythons read this file.  Left out: what is asked; see step.py, recipes.py and rival_speculators.py."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SPECULATORS = "0.9.0"
# What its DFlash imports beside torch, numpy and safetensors, which are borrowed from ours: both run on one and the same build.
NEEDS = ("transformers==5.19.0", "datasets==5.1.0", "openai", "pydantic", "pydantic-settings", "loguru", "tqdm", "httpx", "protobuf")
BARE = (f"speculators=={SPECULATORS}", f"hs-connectors=={SPECULATORS}")     # without their own needs: torchaudio, torchvision


def environment(folder: Path | None = None) -> Path:
    """The Python that has speculators, made where it is missing (a minute, about 500 MB).  RuntimeError if pip fails.

    folder: default ~/.cache/hsdraft/speculators-VERSION, or under XDG_CACHE_HOME."""
    folder = folder or place()
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not python.exists():
        print(f"making an environment for speculators {SPECULATORS} in {folder}", file=sys.stderr, flush=True)
        _run(sys.executable, "-m", "venv", folder)
    borrowed = next((folder / "lib").glob("python*/site-packages")) / "borrowed.pth"
    borrowed.write_text(sysconfig.get_paths()["purelib"] + "\n")             # after its own packages: its transformers comes first
    if not ready.exists() or ready.read_text() != repr((NEEDS, BARE)):
        _run(python, "-m", "pip", "install", "--quiet", *NEEDS)
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", *BARE)
        ready.write_text(repr((NEEDS, BARE)))
    return python


def place() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hsdraft" / f"speculators-{SPECULATORS}"


def made() -> Path | None:
    """That Python where it was made already, seeing this one's torch; None: it is missing."""
    return environment() if (place() / ".ready").exists() else None


def _run(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))} failed:\n{done.stdout[-2000:]}")


class Worker:
    """A process that runs serve().  One thread of torch, in any library; what it prints besides goes to a file, shown if it fails."""

    def __init__(self, python: Path | str, module: str, *words: str, threads: int = 1) -> None:
        self.module, self._log = module, tempfile.TemporaryFile("w+")
        many = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        environment = os.environ | many | {"OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen([str(python), "-m", module, *words], cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=self._log)

    def ask(self, do: str, **values: Any) -> dict:
        """One command, answered when it is done.  RuntimeError with what the process wrote, if it failed."""
        try:
            self._process.stdin.write(json.dumps({"do": do} | values) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._log.seek(0)
            raise RuntimeError(f"{self.module} failed at {do!r}:\n{self._log.read()[-4000:]}")
        return json.loads(answer)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def serve(commands: dict[str, Callable[..., dict]]) -> None:
    """In the worker: each line of input names a command and its values, each is answered by one line.  Ends with the input.

    Whatever else is printed goes to standard error, so that an answer is always a line of its own."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        values = json.loads(line)
        try:
            answer = commands[values.pop("do")](**values)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        print(json.dumps(answer), file=answers, flush=True)


class Peak:
    """How far resident memory rises above where it stood when this was made, in bytes, by the kernel's own high-water mark."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")                       # the mark falls to what is resident now
        self.before = resident("VmRSS")

    def bytes(self) -> int:
        return resident("VmHWM") - self.before


def resident(key: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


def timed(optimizer: Any, name: str = "step") -> list[float]:
    """From now on each call of optimizer.step adds its seconds to the list that is returned."""
    call, seconds = getattr(optimizer, name), []

    def measured(*values: Any) -> Any:
        begin = time.perf_counter()
        out = call(*values)
        seconds.append(time.perf_counter() - begin)
        return out
    setattr(optimizer, name, measured)
    return seconds


if __name__ == "__main__":
    environment()
