"""Which code wrote a record: package version, git commit where there is a checkout, library versions."""
from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path


@functools.cache
def commit() -> str:
    """The checkout's commit, '+' behind it where tracked files differ from it; '' for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""
    head = git("rev-parse", "--short=12", "HEAD")
    return head + "+" if head and git("status", "--porcelain", "--untracked-files=no") else head


def versions(*libraries: str) -> dict[str, str]:
    """{'hsdraft': ..., 'commit': ..., 'python': ..., library: version, ...}; a library that is absent reads 'absent'."""
    found = {"hsdraft": _version("hsdraft"), "commit": commit(), "python": platform.python_version()}
    return found | {name: _version(name) for name in libraries}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
