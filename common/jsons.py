"""JSON that a peer or a disk gave: a value that can be shown and written again, or ValueError.

Python's own reader raises RecursionError on brackets without end, and takes what is just flat enough for it but too deep to be
printed or written later.  So the depth is bounded here, for all readers."""
from __future__ import annotations

import json
from typing import Any

MOST_DEPTH = 32              # lists and maps inside one another; a checkpoint's record has about 6


def loads(text: str | bytes) -> Any:
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested without end") from None
    return shallow(value)


def shallow(value: Any) -> Any:
    """The value, where its lists and maps lie at most MOST_DEPTH deep."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(MOST_DEPTH):
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one) if isinstance(item, (list, dict))]
        if not level:
            return value
    raise ValueError(f"nested more than {MOST_DEPTH} deep")
