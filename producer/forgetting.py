"""`hsprod forget NAME`: asks the producer, by a file beside its cursors, to keep nothing for a trainer any more.

The link's thread is the cursors' one writer and looks for such files every second (protocol/producer_link.py), so a running
producer obeys at once, and one that does not run when it starts.  Left out: a wait for the space, which comes free with the
next sample that needs it."""
from __future__ import annotations

import time
from pathlib import Path

from common import jsons, status
from common.errors import UserError
from protocol.subscribers import FORGET, SEQ_OR_NONE

PATIENCE = 10.0              # seconds until a running producer that does not answer is taken to be starting


def forget(state_dir: Path, name: str, *, patience: float = PATIENCE) -> str:
    """Returns what became of it, one line.  UserError: nobody of that name is known, or it is connected."""
    cursors = {path: known(path) for path in sorted((state_dir / "streams").glob("*/subscribers.json"))}
    streams = [path for path, acked in cursors.items() if name in acked]
    if not streams:
        names = ", ".join(sorted({other for acked in cursors.values() for other in acked})) or "nobody"
        raise UserError(f"no trainer {name!r} is known in {state_dir}; known: {names}")
    here = said(state_dir / "status.json")
    if here.get("running") and here.get("trainers", {}).get(name, {}).get("connected"):
        raise UserError(f"{name} is connected: stop hstrain there first; it would only come back")
    for path in streams:
        (path.parent / FORGET).mkdir(exist_ok=True)
        (path.parent / FORGET / name).touch()
    end = time.monotonic() + (patience if here.get("running") else 0.0)
    while (left := [path for path in streams if name in known(path)]) and time.monotonic() < end:
        time.sleep(0.1)
    if len(left) < len(streams):
        return f"{name} is forgotten: no sample is kept for it any more"
    why = "hsprod serve has not answered yet: it does so once its target is loaded" if here.get("running") else "hsprod serve does not run"
    return f"{why}; {name} will be forgotten when it serves this stream"


def known(path: Path) -> dict[str, int]:
    """{trainer: last sample that it has}.  UserError where the file cannot be read."""
    try:
        return {name: SEQ_OR_NONE(seq) for name, seq in jsons.loads(path.read_text("utf-8"))["acked"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or 'damaged'}; run this as the user that runs hsprod serve") from None


def said(path: Path) -> dict:
    try:
        return status.read(path, time.time())
    except UserError:
        return {}
