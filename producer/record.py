"""The bench's record: what was measured, on what, by which code, so that a rerun can be compared and a change explained.

`identity` is all that could explain another figure; `compare` names what of it differs, and sets the main figures of two
records side by side.  Left out: judging whether a difference is noise; the bench's tables say how their figures spread."""
from __future__ import annotations

import json
import platform
from pathlib import Path

import torch
from rich.console import RenderableType
from rich.text import Text

from common import version
from common.contract import ExtractionContract
from common.drafter import checkpoint
from common.errors import UserError
from producer.prompts import Prompt, prompts_hash
from producer.tables import digits, table

FORMAT = 1
FIGURES = {                 # what is compared: name and unit -> its place in `sections`, and what to multiply by
    "plain, tokens/s": ("rates.plain.tokens_per_s", 1), "speculative, tokens/s": ("rates.speculative.tokens_per_s", 1),
    "prefill, tokens/s": ("rates.plain.prefill_tokens_per_s", 1), "tau, tokens": ("pieces.cycle.tau", 1), "eta": ("speedup.eta", 1),
    "eta / formula, parts in the loop": ("speedup.in_loop.ratio", 1), "eta / formula, parts alone": ("speedup.alone.ratio", 1),
    "cycle, ms": ("pieces.cycle.seconds", 1e3), "verify in the loop, ms": ("pieces.cycle.parts.verify", 1e3),
    "draft in the loop, ms": ("pieces.cycle.parts.draft", 1e3), "rollback, ms": ("pieces.cycle.parts.rollback", 1e3),
    "plain step alone, ms": ("pieces.alone.step", 1e3), "draft alone, ms": ("pieces.alone.draft", 1e3),
    "experts woken by a block": ("experts.verified.mean", 1), "texts compared": ("lossless.prompts", 1),
    "texts identical": ("lossless.identical", 1), "departures": ("lossless.speculative.departures", 1),
    "noise floor, departures": ("lossless.floor.departures", 1), "copy rate, GB/s": ("roofline.copy_rate", 1e-9)}


def identity(contract: ExtractionContract, device: torch.device, folder: Path, prompts: list[Prompt]) -> dict:
    """folder: the drafter's, already loaded, so whole."""
    record = folder / checkpoint.RECORD
    return {"code": version.versions("torch", "transformers", "tokenizers", "triton", "numpy"), "device": device_name(device),
            "system": platform.platform(), "threads": torch.get_num_threads(), "contract": contract.hash, "target": contract.to_dict(),
            "drafter": {"folder": folder.name, "sha256": checkpoint.checkpoint_hash(folder),
                        "record": json.loads(record.read_text("utf-8")) if record.exists() else None},
            "prompts": {"sha256": prompts_hash(prompts), "count": len(prompts)}}


def device_name(device: torch.device) -> str:
    """A GPU's name, or the processor's as Linux knows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def read(path: Path) -> dict:
    """An earlier record.  UserError for a file that is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--against {path}: {getattr(error, 'strerror', None) or 'no JSON'}") from None
    if not isinstance(found, dict) or found.get("hsdraft_bench") != FORMAT or not all(
            isinstance(found.get(key), dict) for key in ("identity", "settings", "sections")):
        raise UserError(f"--against {path}: no record of `hsprod bench`, or of another version's; this one writes format {FORMAT}")
    return found


def compare(old: dict, new: dict) -> dict:
    """differs: 'place: then -> now' of everything in identity and settings that is not the same; figures: then, now and their
    ratio now / then (None where one is missing or then is 0).  Pure."""
    before, after = (flat({"identity": record["identity"], "settings": record["settings"]}) for record in (old, new))
    differs = [f"{place.partition('.')[2]}: {short(before.get(place))} -> {short(after.get(place))}"
               for place in sorted(before.keys() | after.keys()) if before.get(place) != after.get(place)]
    rows = []
    for name, (place, unit) in FIGURES.items():
        found = [lookup(record["sections"], place) for record in (old, new)]
        then, now = (None if value is None else value * unit for value in found)
        if then is not None or now is not None:
            rows.append({"figure": name, "then": then, "now": now, "ratio": now / then if then and now is not None else None})
    return {"against": old.get("started", ""), "differs": differs, "figures": rows}


def flat(tree: dict, under: str = "") -> dict[str, object]:
    """Nested tables -> 'a.b.c': value; lists are values."""
    found: dict[str, object] = {}
    for key, value in tree.items():
        found |= flat(value, f"{under}{key}.") if isinstance(value, dict) and value else {f"{under}{key}": value}
    return found


def lookup(tree: object, place: str) -> float | None:
    """The number at 'a.b.c', None where there is none."""
    for key in place.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, (int, float)) else None


def short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:16]}...{text[-8:]}"


def show(compared: dict) -> list[RenderableType]:
    said = "\n".join(["What differs:", *(f"  {line}" for line in compared["differs"])] if compared["differs"] else
                     ["Nothing that identifies the run differs."])
    made = table(f"Against the record of {compared['against'] or 'an unknown time'}", "figure", "then", "now", "now / then")
    for row in compared["figures"]:
        made.add_row(row["figure"], digits(row["then"]), digits(row["now"]), "-" if row["ratio"] is None else f"{row['ratio']:.3f}")
    return [made, Text(said)]
