"""Table 1: tokens a second, plain and speculative, and llama.cpp's for scale, read from a file that llama-bench wrote.

Pooled over prompts: all tokens after the first, over all seconds after the prefill, by the wall clock.  llama-bench measures
other weights (a quantisation, as a rule) and synthetic tokens, so its row says how far away the other world is, no more."""
from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from common.errors import UserError
from producer.pairs import Pair, Timed
from producer.tables import digits, table

NEEDED = {"n_prompt": int, "n_gen": int, "avg_ts": (int, float)}     # of a llama-bench row; the rest only names it


def measure(pairs: Sequence[Pair], llama: list[dict]) -> dict:
    counted = [pair for pair in pairs if pair.counts]
    plain, spec = ([getattr(pair, way) for pair in counted] for way in ("plain", "spec"))
    prompt_tokens = sum(len(pair.ids) for pair in counted)
    return {"plain": rate(plain, prompt_tokens), "speculative": rate(spec, prompt_tokens), "prompts": len(counted),
            "left_out": len(pairs) - len(counted), "llama_bench": llama}


def rate(runs: Sequence[Timed], prompt_tokens: int) -> dict:
    """tokens and seconds after the first token, their quotient, and each prompt's own."""
    tokens, seconds = sum(run.new for run in runs), sum(run.decoding for run in runs)
    prefill = sum(run.decoded.seconds["prefill"] for run in runs)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds,
            "by_prompt": [run.new / run.decoding for run in runs],
            "prompt_tokens": prompt_tokens, "prefill_seconds": prefill, "prefill_tokens_per_s": prompt_tokens / prefill}


def show(measured: dict) -> Table:
    notes = [f"Pooled over {measured['prompts']} prompts, after each text's first token, by the wall clock. The speculative prefill "
             "fills the drafter's context too."]
    if measured["left_out"]:
        notes.append(f"{measured['left_out']} prompts left out: a text of one token has no rate.")
    if measured["llama_bench"]:
        notes.append("llama.cpp: other weights and synthetic tokens, for scale only; +- is its own standard deviation.")
    made = table("1. Token rates", "decoding", "tokens/s", "slowest / median / fastest prompt, tokens/s", "prefill, tokens/s", "tokens",
                 note=" ".join(notes))
    for way in ("plain", "speculative"):
        row = measured[way]
        of = sorted(row["by_prompt"])
        made.add_row(way, digits(row["tokens_per_s"]), " / ".join(map(digits, (of[0], statistics.median(of), of[-1]))),
                     digits(row["prefill_tokens_per_s"]), str(row["tokens"]))
    for row in measured["llama_bench"]:
        made.add_row(*_llama_row(row))
    return made


def _llama_row(row: dict) -> tuple[str, str, str, str, str]:
    """A test of a prompt alone is a prefill; one that also generates is a rate of both together, and says so by its name."""
    words = " ".join(str(row[key]) for key in ("model_type", "backends") if row.get(key))
    said, spread = digits(row["avg_ts"]), "" if row.get("stddev_ts") is None else f"+- {digits(row['stddev_ts'])}"
    name = f"llama.cpp {row.get('build_commit', '')} {words}, {test_name(row)}".replace("  ", " ")
    return (name, said, spread, "", str(row["n_gen"])) if row["n_gen"] else (name, "", spread, said, "")


def test_name(row: dict) -> str:
    """As llama-bench itself writes it: pp512, tg128, pp512+tg128, and @ d4096 behind it for a filled context."""
    name = "+".join(f"{kind}{row[key]}" for kind, key in (("pp", "n_prompt"), ("tg", "n_gen")) if row[key])
    return name + (f" @ d{row['n_depth']}" if row.get("n_depth") else "")


def read_llama_bench(path: Path) -> list[dict]:
    """The rows of `llama-bench -o json` (one list) or `-o jsonl` (one object a line).  UserError for anything else."""
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--llama-bench {path}: {getattr(error, 'strerror', None) or 'no text'}") from None
    try:
        rows = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        rows = []
    good = [row for row in rows if isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in NEEDED.items())
            and (row["n_prompt"] or row["n_gen"])]
    if not rows or len(good) < len(rows):
        raise UserError(f"--llama-bench {path}: not what `llama-bench -o json` or `-o jsonl` prints (objects with "
                        f"{', '.join(NEEDED)}); run it again with one of these")
    return good
