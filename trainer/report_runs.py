"""Run folders for the report: which there are, what they measured, and whether they may stand side by side.

A folder of runs (a sweep's) stands for all runs in it.  Reads run.json and metrics.jsonl alone, so it works while a run goes on and
on another box.  Left out: every figure that is computed from the rows."""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import metrics
from common.errors import UserError

TOLERANCE = 0.01             # of the training tokens: rows this near count as measured at equal tokens
KINDS = {"real": "eval", "simulated": "offline"}               # where acceptance was measured -> kind of row
# Fields of run.json that the arm or the seed decides; any other that differs between runs is said.
OF_THE_ARM = ("arm", "seed", "drafter.is_causal", "drafter.layer_types", "drafter.block_size", "drafter.dflash_config.block_size",
              "drafter.use_sliding_window", "drafter.draft_vocab_size", "drafter.dflash_config.draft_vocab_size", "draft_vocab")


@dataclass(frozen=True)
class RunRecord:
    """rows: {"real": [...], "simulated": [...]}, each ascending by step; identity: run.json."""

    name: str
    identity: dict
    rows: dict[str, list[dict]]

    @property
    def arm(self) -> str:
        return self.identity["arm"]["name"]

    @property
    def seed(self) -> int:
        return self.identity["seed"]

    @property
    def label(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    @property
    def block_size(self) -> int | None:
        return self.identity.get("drafter", {}).get("block_size")

    @property
    def dtype(self) -> str:
        """The target's compute dtype; "" where the run does not say."""
        return self.identity.get("extraction", {}).get("dtype", "")


def load(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs in these folders, by arm in order of appearance, then seed.  UserError: a folder with no run in it, runs that may not
    be compared (another contract), one arm and seed twice."""
    folders = dict.fromkeys(folder.resolve() for path in paths for folder in _folders(path))
    runs = [_read(folder) for folder in folders]
    for run in runs[1:]:
        if wrong := contract_differences(runs[0].identity, run.identity):
            raise UserError(f"{runs[0].name} and {run.name} cannot be compared, their extraction contracts differ in {'; '.join(wrong)}: "
                            "report them apart")
    first: dict[tuple, str] = {}
    for run in runs:
        if other := first.get((run.arm, run.seed)):
            raise UserError(f"{other} and {run.name} are both {run.label}: report them apart")
        first[run.arm, run.seed] = run.name
    order = list(dict.fromkeys(run.arm for run in runs))
    return sorted(runs, key=lambda run: (order.index(run.arm), run.seed))


def sweeps_under_way(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """(name, runs asked for, runs begun) of each sweep's folder in which some are missing."""
    out = []
    for path in paths:
        if (path / "sweep.json").exists():
            said = json.loads((path / "sweep.json").read_text())
            asked, begun = len(said["arms"]) * len(said["seeds"]), len(_folders(path))
            out += [(path.name, asked, begun)] if begun < asked else []
    return out


def contract_differences(ours: dict, theirs: dict) -> list[str]:
    """'field: ours -> theirs' where two runs' contracts differ, by the hash alone where a run holds no more; [] where equal."""
    if ours["contract"] == theirs["contract"]:
        return []
    a, b = (flat(identity.get("extraction", {"target": identity.get("target")})) for identity in (ours, theirs))
    named = [f"{name}: {_clip(a.get(name))} -> {_clip(b.get(name))}" for name in sorted({*a, *b}) if name in a and name in b and a[name] != b[name]]
    return named or [f"contract: {ours['contract'][:12]} -> {theirs['contract'][:12]} (the runs do not say in which field)"]


def setting_differences(runs: Sequence[RunRecord]) -> dict[str, dict[str, list[str]]]:
    """{field of run.json: {value: [run, ...]}} of what differs though neither arm nor seed decides it."""
    values = {run.name: flat(run.identity) for run in runs}
    fields = sorted({name for one in values.values() for name in one
                     if not any(name == of or name.startswith(of + ".") for of in (*OF_THE_ARM, "extraction", "contract"))})
    out = {}
    for name in fields:
        by_value: dict[str, list[str]] = {}
        for run, one in values.items():
            by_value.setdefault(_clip(one.get(name, "not said")), []).append(run)
        if len(by_value) > 1:
            out[name] = by_value
    return out


def common_tokens(measured: Sequence[Iterable[int]], tolerance: float = TOLERANCE) -> int | None:
    """The largest number of training tokens at which every run was measured (within the tolerance); None where there is none."""
    measured = [list(tokens) for tokens in measured]
    for at in sorted({t for tokens in measured for t in tokens}, reverse=True):
        if all(any(_near(t, at, tolerance) for t in tokens) for tokens in measured):
            return at
    return None


def row_at(rows: Sequence[dict], tokens: int, tolerance: float = TOLERANCE) -> dict | None:
    """The row measured nearest to this many training tokens, within the tolerance."""
    near = [row for row in rows if _near(row["tokens"], tokens, tolerance)]
    return min(near, key=lambda row: abs(row["tokens"] - tokens), default=None)


def accepted_lists(row: dict) -> dict[str, list[int]] | None:
    """{prompt: accepted of each block} of a row; None where it has none.  Texts held aside are named by their number."""
    if texts := row.get("texts") if isinstance(row.get("texts"), list) else None:
        return {text["prompt"]: text["accepted"] for text in texts}
    return {str(i): accepted for i, accepted in enumerate(row["accepted"])} if row.get("accepted") else None


def flat(values: dict, prefix: str = "") -> dict:
    """Nested values under names like plan.steps."""
    return {name: value for k, v in values.items() for name, value in (flat(v, f"{prefix}{k}.") if isinstance(v, dict) else {prefix + k: v}).items()}


def _folders(path: Path) -> list[Path]:
    if (path / "run.json").exists():
        return [path]
    found = sorted(file.parent for pattern in ("*/run.json", "runs/*/run.json") for file in path.glob(pattern))
    if not found:
        raise UserError(f"{path} is neither a run folder (it has no run.json) nor a folder of runs that have begun")
    return found


def _read(folder: Path) -> RunRecord:
    try:
        identity = json.loads((folder / "run.json").read_text())
        rows = {source: sorted(metrics.read(folder / "metrics.jsonl", kind), key=lambda row: row["step"]) for source, kind in KINDS.items()}
        run = RunRecord(folder.name, identity, rows)
        _ = run.arm, run.seed, identity["contract"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: run.json or metrics.jsonl cannot be read ({type(error).__name__}: {error})") from None
    return run


def _near(tokens: float, at: float, tolerance: float) -> bool:
    return abs(tokens - at) <= tolerance * at


def _clip(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:18] + "..." + text[-8:]
