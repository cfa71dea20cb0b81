"""A folder says in a file what it is for; whoever comes with something else is refused, by the fields that differ."""
from __future__ import annotations

import json
from pathlib import Path

from common import files
from common.errors import UserError


def claim(path: Path, identity: dict, *, what: str, option: str) -> None:
    """Write identity (values as JSON reads them back) into the file, or compare it with what stands there.

    what: a run, a sweep.  option: of the command line, that names the folder.  UserError with each field, old -> new."""
    if not path.exists():
        files.write_whole(path, json.dumps(identity, indent=1).encode())
        return
    there, here = _flat(json.loads(path.read_text())), _flat(identity)
    if wrong := [f"{k}: {_clip(there.get(k))} -> {_clip(here.get(k))}" for k in sorted({*there, *here}) if there.get(k) != here.get(k)]:
        raise UserError(f"{path.parent} holds another {what} ({'; '.join(wrong)}); give another {option}, or the settings and code it was made with")


def _flat(values: dict, prefix: str = "") -> dict:
    """Nested values under names like plan.steps."""
    return {name: value for k, v in values.items() for name, value in (_flat(v, f"{prefix}{k}.") if isinstance(v, dict) else {prefix + k: v}).items()}


def _clip(value: object) -> str:
    return text if len(text := str(value)) <= 40 else text[:37] + "..."
