"""One training step beside speculators 0.9.0's, at equal shapes: tokens/s, label slots/s, and how far resident memory rises.

    python benchmarks/step.py [--rounds 5] [--case ce --case kl --case kl-248k] [--tokens 512 --anchors 64] [--json FILE]

Both sides train the same network (hidden 576, 5 taps, 2 layers that slide and are causal, fp32, one thread, sdpa with a dense mask)
on the same random capture, from their own code: ours trainer.step, theirs the model, losses, metrics, anchors and optimiser as its
trainer calls them, in a process of its own with the transformers that it wants (rivals.py, rival_speculators.py).  The two take turns,
ours, theirs, ours, theirs; medians and the ratio of each turn's pair are shown.  A step is forward, loss with its metrics, backward,
clip and optimiser; the optimiser's part, the same torch code on both sides, is also shown apart.  Not in it: making the batch.

Same for both: rows of the head (anchors x 15; ours takes the first seed whose anchors leave each slot a label, as theirs always do)
and the weights of slots (exp decay).  Not the same: their CE label is the argmax of the target's logits, for which it applies the
head a second time; ours is the data's token.  Memory is VmHWM over what was resident before the first step, so it counts
activations, gradients and optimiser state, and no weights.

    --head-rows 7680     also: our head and loss alone over so many rows at V = 248320 (512 anchors x 15), rise of memory"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rivals

GIB = 2 ** 30


@dataclass(frozen=True, kw_only=True)
class Case:
    """What both sides do.  arm: ours; loss and weights: the same in speculators' words."""

    vocab: int
    arm: str
    loss: str
    weights: str = "fixed-exp-decay"


CASES = {"ce": Case(vocab=49152, arm="ce_causal", loss="ce"),
         "kl": Case(vocab=49152, arm="kl_causal", loss="kl_div"),
         "kl-248k": Case(vocab=248320, arm="kl_causal", loss="kl_div")}
HIDDEN, TAPS, LAYERS, BLOCK, WINDOW = 576, (1, 7, 14, 21, 27), 2, 16, 2048


def shape_of(vocab: int, attention: str = "causal") -> dict:
    """config.json of the network that both train: SmolLM2's width, all layers sliding."""
    from common.drafter.config import SLIDING, shape_for
    return shape_for(HIDDEN, vocab, 30, TAPS, vocab - 1, attention, num_hidden_layers=LAYERS, layer_types=(SLIDING,) * LAYERS,
                     sliding_window=WINDOW, block_size=BLOCK).to_json()


# ---- ours, in a process of its own

held: dict = {}


def build(shape: dict, tokens: int, anchors: int, arm: str, optimizer: str, threads: int) -> dict:
    import torch

    from benchmarks.random_capture import embedding_of, random_capture
    from common.drafter.config import DrafterConfig
    from common.drafter.model import Drafter
    from trainer import arms
    from trainer.batch import make_batch
    from trainer.optim import Optimizer
    torch.set_num_threads(threads)
    config, capture = DrafterConfig.from_json(shape), random_capture(shape, tokens)
    drafter = Drafter(config, generator=torch.Generator().manual_seed(0))
    for seed in itertools.count():
        batch = make_batch([capture], config, arms.named(arm), anchors=anchors, max_tokens=tokens, generators=[torch.Generator().manual_seed(seed)])
        if int(batch.supervised.sum()) == anchors * (config.block_size - 1):
            break
    held.update(drafter=drafter, optimizer=Optimizer(drafter, optimizer, 1e-3), embedding=embedding_of(shape), batch=batch,
                arm=arms.named(arm))
    held["seconds"] = rivals.timed(held["optimizer"])
    held["peak"] = rivals.Peak()
    return {"resident": held["peak"].before, "parameters": sum(p.numel() for p in drafter.parameters())}


def step() -> dict:
    from trainer.step import train_step
    begin = time.perf_counter()
    made = train_step(held["drafter"], held["optimizer"], held["embedding"], held["embedding"], held["batch"], held["arm"], 1.0)
    return {"loss": made["loss"], "slots": made["slots"], "seconds": time.perf_counter() - begin, "optimizer": held["seconds"].pop()}


def peak() -> dict:
    return {"peak": held["peak"].bytes()}


# ---- the parent

def compare(case: Case, python: Path, *, rounds: int, tokens: int, anchors: int, optimizer: str, threads: int) -> dict:
    """{ours, theirs: {seconds, optimizer (lists by round), peak, resident, slots, loss}}; the first turn warms and is not timed."""
    shape = shape_of(case.vocab)
    common = {"shape": shape, "tokens": tokens, "anchors": anchors, "optimizer": optimizer, "threads": threads}
    with (rivals.Worker(sys.executable, "benchmarks.step", "--worker", threads=threads) as ours,
          rivals.Worker(python, "benchmarks.rival_speculators", threads=threads) as theirs):
        sides = {"ours": ours, "theirs": theirs}
        out = {"ours": ours.ask("build", **common, arm=case.arm), "theirs": theirs.ask("build", **common, loss=case.loss, weights=case.weights)}
        if out["ours"]["parameters"] != out["theirs"]["parameters"]:
            raise RuntimeError(f"not the same network: {out['ours']['parameters']} and {out['theirs']['parameters']} parameters")
        for turn in range(rounds + 1):
            for name, side in sides.items():
                made = side.ask("step")
                for key in ("seconds", "optimizer"):
                    out[name].setdefault(key, []).extend([made[key]] if turn else [])
                out[name] |= {key: made[key] for key in ("slots", "loss")} if not turn else {}
        for name, side in sides.items():
            out[name] |= side.ask("peak")
    return out


def ratios(out: dict, without_optimizer: bool = False) -> list[float]:
    """Theirs / ours, turn by turn: how many times as fast ours is."""
    taken = {name: [s - o * without_optimizer for s, o in zip(out[name]["seconds"], out[name]["optimizer"], strict=True)]
             for name in ("ours", "theirs")}
    return [theirs / ours for ours, theirs in zip(taken["ours"], taken["theirs"], strict=True)]


def head_alone(vocab: int, rows: int, arm: str) -> dict:
    """Rise of resident memory in our head and loss over so many rows, forward and backward, and its seconds."""
    import torch

    from common.drafter.config import DrafterConfig
    from trainer import arms
    from trainer.head import Rows, weighted_sums
    torch.set_num_threads(1)
    shape = shape_of(vocab)
    from benchmarks.random_capture import embedding_of
    DrafterConfig.from_json(shape)
    head, generator = embedding_of(shape), torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(vocab, (rows,), generator=generator)
    loss = arms.named(arm).loss
    slots = torch.arange(rows)
    made = Rows(labels=labels, weights=torch.ones(rows), blocks=slots // (BLOCK - 1), slots=1 + slots % (BLOCK - 1), block_size=BLOCK,
                finals=torch.randn(rows, HIDDEN, generator=generator).bfloat16() if loss != "ce" else None)
    mark, begin = rivals.Peak(), time.perf_counter()
    weighted_sums(hidden, head, made, loss).numerator.backward()
    return {"peak": mark.bytes(), "seconds": time.perf_counter() - begin, "rows": rows, "vocab": vocab}


def table(results: dict[str, dict], tokens: int, title: str):
    from rich.table import Table
    out = Table("case", "side", "step s", "tokens/s", "slots/s", "of it optimiser s", "rise GiB", "times as fast", "without optimiser", title=title)
    for name, result in results.items():
        for side in ("ours", "theirs"):
            mine = result[side]
            median = statistics.median(mine["seconds"])
            speed = [f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in (ratios(result), ratios(result, True))]
            out.add_row(name if side == "ours" else "", side, f"{median:.2f}", f"{tokens / median:.0f}", f"{mine['slots'] / median:.0f}",
                        f"{statistics.median(mine['optimizer']):.2f}", f"{mine['peak'] / GIB:.2f}", *(speed if side == "ours" else ("", "")))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--head-rows", type=int, default=0)
    parser.add_argument("--head-arm", default="kl_causal", help="whose loss --head-rows takes; each row with a teacher of its own")
    parser.add_argument("--python", type=Path, help="a Python that has speculators; default: one made in the cache folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from rich.console import Console
    console, results, record = Console(width=140), {}, {"options": {k: str(v) for k, v in vars(options).items()}}
    python = options.python or rivals.environment()
    for name in options.case or CASES:
        results[name] = compare(CASES[name], python, rounds=options.rounds, tokens=options.tokens, anchors=options.anchors,
                                optimizer=options.optimizer, threads=options.threads)
        record[name] = {"case": asdict(CASES[name])} | results[name] | {"ratios": ratios(results[name])}
    title = (f"hidden {HIDDEN}, {len(TAPS)} taps, {LAYERS} layers, {options.tokens} tokens, {options.anchors} anchors of {BLOCK}, fp32, "
             f"{options.threads} thread, {options.optimizer}, {options.rounds} turns; V {', '.join(f'{n}: {CASES[n].vocab}' for n in results)}")
    console.print(table(results, options.tokens, title))
    if options.head_rows:
        with rivals.Worker(sys.executable, "benchmarks.step", "--worker", threads=options.threads) as worker:
            record["head"] = made = worker.ask("head", vocab=248320, rows=options.head_rows, arm=options.head_arm)
        console.print(f"our head and loss alone, {options.head_arm}, {made['rows']} rows, V {made['vocab']}: memory rises by "
                      f"{made['peak'] / GIB:.2f} GiB above the weights ({made['seconds']:.0f} s); dense fp32 logits would be {4 * made['rows'] * made['vocab'] / GIB:.1f} GiB")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        rivals.serve({"build": build, "step": step, "peak": peak, "head": head_alone})
    else:
        main()
