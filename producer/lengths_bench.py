"""What verifying less than the block is worth: the curve over the length v, and the real rate of some lengths and of auto.

Every way decodes every prompt, one right after the other and in a turning order, so that whatever else the box does meets all
alike; ratios are taken within a prompt.  Greedy.  Left out: prefill, which is the same for all."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from common.drafter.acceptance import slot_rates, tau_pooled
from common.drafter.model import Drafter
from common.errors import UserError
from producer.evaluate import Prompts
from producer.lengths import AUTO, FULL, Auto, Costs, Fixed, calibrate, expected_tau
from producer.speculate import Decoded, Length, Limit, plain, speculate
from producer.tables import table
from producer.target import Target

PLAIN = "plain"


@dataclass
class Watched:
    """Verifies whole blocks and keeps what became of each: (slots, drafts that stood, seconds of draft and verify)."""

    blocks: list[tuple[int, int, float, float]] = field(default_factory=list)

    def choose(self, slots: int) -> int:
        return slots

    def saw(self, verified: int, accepted: int, draft_seconds: float, verify_seconds: float) -> None:
        self.blocks.append((verified, accepted, draft_seconds, verify_seconds))


def measure(target: Target, drafter: Drafter, prompts: Prompts, limit: Limit, *, block_size: int | None = None,
            fixed: Sequence[int] | None = None, progress: Callable[[int, int], None] = lambda done, of: None) -> dict:
    """-> plain numbers, lists and dicts; seconds unless named otherwise.  `show` prints them.

    fixed: lengths to decode with, besides plain, full and auto; None: 2, 4, 8, ... below B.  progress(prompts done, of).
    Raises UserError where no prompt gives a text of two tokens."""
    size = block_size or drafter.config.block_size
    chosen = [v for v in ((1 << k for k in range(1, size.bit_length())) if fixed is None else fixed) if v < size]
    costs = calibrate(target, drafter, prompts[0][1], size)
    watched, auto = Watched(), Auto(costs)
    ways: dict[str, Length | None] = {PLAIN: None, FULL: watched} | {str(v): Fixed(v) for v in chosen} | {AUTO: auto}

    def decode(way: str, ids: list[int]) -> Decoded:
        return (plain(target, ids, limit) if way == PLAIN else
                speculate(target, drafter, ids, limit, block_size=size, length=ways[way]))

    plain(target, prompts[0][1], Limit(4))                          # what first use costs; calibrate did so for the others
    names, texts = list(ways), []
    for number, (_, ids) in enumerate(prompts):
        progress(number, len(prompts))
        turn = number % len(names)
        texts.append({way: decode(way, ids) for way in names[turn:] + names[:turn]})
    long = [text for text in texts if len(text[PLAIN].tokens) > 1 and all(len(text[way].tokens) > 1 for way in names)]
    if not long:
        raise UserError(f"none of {len(prompts)} prompts gives a text of two tokens: there is nothing to measure")
    runs = {way: _run(way, texts, long) for way in names}
    rest = sum(text[FULL].seconds[part] for text in long for part in ("judge", "loop", "rollback", "context")) / len(watched.blocks)
    return {"block_size": size, "prompts": len(prompts), "timed": len(long), "curve": curve(costs, rest, watched.blocks, size),
            "runs": runs, "auto": {"blocks": auto.blocks, "probes": auto.probes, "verified": auto.slots / auto.blocks},
            "gain_over_full": _ratio(long, FULL, AUTO)}


def curve(costs: Costs, rest: float, blocks: list[tuple[int, int, float, float]], size: int) -> list[dict]:
    """For v = 1..B: T_t, T_d, expected tau and tokens/s, from whole blocks (slots, stood, seconds of draft and verify).

    The calibrated seconds keep their shape and take their scale from the whole blocks, whose context was longer; rest is
    those blocks' own.  A slot that no block got to is taken as one that never stands: nothing would change if it did."""
    whole = [block for block in blocks if block[0] == size] or blocks
    slower = statistics.median(verify / costs.verify[slots - 1] for slots, _, _, verify in whole)
    drafted = [draft / costs.draft[slots - 1] for slots, _, draft, _ in whole if slots > 1]
    dearer = statistics.median(drafted) if drafted else 1.0
    given, _ = slot_rates([stood for _, stood, _, _ in blocks], [slots - 1 for slots, *_ in blocks], size)
    rows = []
    for v, tau in enumerate(expected_tau([0.0 if rate != rate else rate for rate in given]), 1):
        verify, draft = slower * costs.verify[v - 1], dearer * costs.draft[v - 1]
        rows.append({"v": v, "verify_seconds": verify, "draft_seconds": draft, "rest_seconds": rest, "tau": tau,
                     "tokens_per_s": tau / (verify + draft + rest)})
    return rows


def _run(way: str, texts: list[dict[str, Decoded]], long: list[dict[str, Decoded]]) -> dict:
    """One way's figures, pooled over prompts; eta is the median within a prompt."""
    runs = [text[way] for text in long]
    seconds, tokens = sum(run.decode_seconds for run in runs), sum(len(run.tokens) - 1 for run in runs)
    offered = [n for run in runs for n in run.offered]
    return {"tokens_per_s": tokens / seconds, "eta": _ratio(long, PLAIN, way), "eta_pooled": _pooled(long, PLAIN, way),
            "tau": tau_pooled([run.accepted for run in runs]) if offered else None,
            "verified": 1 + sum(offered) / len(offered) if offered else None,
            "identical": sum(text[way].tokens == text[PLAIN].tokens for text in texts), "texts": len(texts)}


def _seconds_a_token(decoded: Decoded) -> float:
    return decoded.decode_seconds / (len(decoded.tokens) - 1)


def _ratio(long: list[dict[str, Decoded]], slow: str, fast: str) -> float:
    """How much faster one way is than another, the median over prompts."""
    return statistics.median(_seconds_a_token(text[slow]) / _seconds_a_token(text[fast]) for text in long)


def _pooled(long: list[dict[str, Decoded]], slow: str, fast: str) -> float:
    slow_seconds, fast_seconds = (sum(text[way].decode_seconds for text in long) / sum(len(text[way].tokens) - 1 for text in long)
                                  for way in (slow, fast))
    return slow_seconds / fast_seconds


def show(measured: dict) -> Table:
    runs, best = measured["runs"], max(measured["curve"], key=lambda row: row["tokens_per_s"])["v"]
    auto = measured["auto"]
    made = table(f"8. Verify length, of blocks of {measured['block_size']}", "slots v", "T_t, ms", "T_d, ms", "tau, exp.", "tokens/s, exp.",
                 "tokens/s", "eta", "tau", "same text", words=0, note=(
        f"exp.: expected by the curve; beside it decoded for real. auto: {measured['gain_over_full']:.2f}x verifying all (median over "
        f"{measured['timed']} prompts, calibration not counted); {auto['verified']:.1f} slots a block, {auto['probes']} of {auto['blocks']} "
        f"blocks were probes; the curve's best is {best}."))

    def real(way: str) -> list[str]:
        run = runs[way]
        tau = "" if run["tau"] is None else f"{run['tau']:.2f}"
        return [f"{run['tokens_per_s']:.1f}", f"{run['eta']:.2f}", tau, f"{run['identical']}/{run['texts']}"]

    for row in measured["curve"]:
        way = FULL if row["v"] == measured["block_size"] else str(row["v"])
        made.add_row(str(row["v"]), f"{1e3 * row['verify_seconds']:.2f}", f"{1e3 * row['draft_seconds']:.2f}", f"{row['tau']:.2f}",
                      f"{row['tokens_per_s']:.1f}", *(real(way) if way in runs else []))
    made.add_section()
    made.add_row(PLAIN, "", "", "", "", *real(PLAIN))
    made.add_row(AUTO, "", "", "", "", *real(AUTO))
    return made
