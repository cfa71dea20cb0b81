"""Decoding: our loop, z-lab's dflash 0.1.0 and transformers' own DFlash generation, with one drafter on one dense target.

    pip install --no-deps dflash==0.1.0
    python benchmarks/decode.py [--drafter DIR] [--hybrid-drafter DIR] [--prompts 8] [--new-tokens 96]

The same weights and prompts for all, sdpa, fp32, one thread, one process, greedy.  Every way decodes every prompt, one right
after the other and in a turning order, so that what else the box does meets all alike.  Timed is the whole call, prefill
included: the ways divide their work differently before and after the first token (dflash and transformers feed the prompt's
taps to the drafter after it), so only the whole is the same thing for all.  A ratio is taken within its prompt.  Beside the
wall clock stands the processor time of the one thread that works, which other load hardly touches.

The rivals run the target as transformers loads it, ours as producer.target.load does, which on a CPU lays large matrices out
once (producer.packed).  The row "ours, their target" is our loop on their very module, so that what the loop itself is worth
can be told from what the target's forward is: nearly the whole gain is the forward's.

dflash was written for transformers 5.15 and runs here on the installed one.  Its own statistics are asked for, because they
hold the accepted lengths; its clock, which waits for a GPU, is replaced by a plain one where there is none.

On the hybrid target speeds are not compared: dflash's texts are others there, since its cache cannot be cropped (pitfall S1).
The second table counts them.

Without --drafter one is trained on the spot on the target's answers to the very prompts that are measured, so that blocks
are accepted: its tau is no achievement, and is the same for all."""
from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from adapters import Assistant
from rich.console import Console
from rich.table import Table

from common.capture import parse_taps
from common.drafter import checkpoint, geometry
from common.drafter.acceptance import tau_pooled
from common.drafter.config import shape_for
from common.drafter.model import Drafter, init_scales
from producer import prompts as prompting
from producer.config import Serve
from producer.speculate import Limit, first_divergence, margin, plain, speculate
from producer.target import Target, load, locate
from producer.weights import read

PROMPTS = Path(prompting.__file__).parent / "data" / "prompts.jsonl"
REACH = 1.15
ANCHORS = 8                 # of one training step
OURS, LOOP, ZLAB, HF, PLAIN = "ours", "ours, their target", "dflash 0.1.0", f"transformers {transformers.__version__}", "plain"


@dataclass(frozen=True)
class Run:
    """tokens: the new ones; accepted: draft tokens that stood, per block; seconds of the whole call: wall clock, processor."""

    tokens: list[int]
    accepted: list[int]
    wall: float = 0.0
    cpu: float = 0.0


class Listener:
    """A streamer that remembers how many tokens each call brought: the prompt, the first token, then one block each."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is left to do."""


def ways(target: Target, stock: Target, drafter: Drafter, folder: Path, limit: Limit) -> dict[str, Callable[[list[int]], Run]]:
    """Each way: a prompt's ids -> Run, untimed.  stock: the target as transformers loads it.  drafter: what the folder holds."""
    import dflash.model as dflash
    if target.device.type != "cuda":
        dflash._cuda_time = time.perf_counter
    theirs = dflash.DFlashDraftModel.from_pretrained(folder, attn_implementation="sdpa", dtype=target.dtype).to(target.device)
    theirs.eval()
    assistant, ends = Assistant(drafter), sorted(limit.eos_ids)

    def ours(on: Target, ids: list[int]) -> Run:
        out = speculate(on, drafter, ids, limit)
        return Run(out.tokens, out.accepted)

    def zlab(ids: list[int]) -> Run:
        prompt = torch.tensor([ids], device=target.device)
        out = dflash.dflash_generate(theirs, stock.model, prompt, limit.max_new_tokens, ends, return_stats=True)
        return Run(out.output_ids[0, len(ids):].tolist(), [n - 1 for n in out.acceptance_lengths])

    @torch.inference_mode()
    def library(ids: list[int]) -> Run:
        listener, prompt = Listener(), torch.tensor([ids], device=target.device)
        out = stock.model.generate(prompt, assistant_model=assistant, speculation_type="dflash", do_sample=False,
                                   max_new_tokens=limit.max_new_tokens, eos_token_id=ends, streamer=listener)
        return Run(out[0, len(ids):].tolist(), [n - 1 for n in listener.counts[2:]])

    return {OURS: functools.partial(ours, target), LOOP: functools.partial(ours, stock), ZLAB: zlab, HF: library,
            PLAIN: lambda ids: Run(plain(target, ids, limit).tokens, [])}


def timed(way: Callable[[list[int]], Run], ids: list[int]) -> Run:
    wall, cpu = time.perf_counter(), time.thread_time()
    run = way(ids)
    return Run(run.tokens, run.accepted, time.perf_counter() - wall, time.thread_time() - cpu)


def interleaved(callables: dict[str, Callable[[list[int]], Run]], prompts: list[list[int]]) -> dict[str, list[Run]]:
    """Every way on every prompt; the order turns by one each time, the first prompt is met once before for warmth."""
    names, runs = list(callables), {name: [] for name in callables}
    for way in callables.values():
        way(prompts[0])
    for i, ids in enumerate(prompts):
        for name in names[i % len(names):] + names[:i % len(names)]:
            runs[name].append(timed(callables[name], ids))
    return runs


def held_out(target: Target, count: int, file: Path) -> list[list[int]]:
    """The first `count` prompts that `hsprod serve` holds out, as the target's chat template writes them."""
    split = prompting.split(prompting.read(file), Serve.held_out, prompting.SALT)
    return [prompting.render(target.tokenizer, prompt, None) for prompt in split.held_out[:count]]


def trained(target: Target, prompts: list[list[int]], limit: Limit, steps: int) -> Drafter:
    """A drafter that has learned these very answers by heart, as far as so many steps go."""
    taps = parse_taps("auto", target.n_layers)
    drafter = Drafter(shape_for(target.hidden_size, target.vocab_size, target.n_layers, taps, target.mask_token_id, "mixed"),
                      torch.Generator().manual_seed(0))
    texts, rng = [], torch.Generator().manual_seed(0)
    for ids in prompts:
        text = torch.tensor(ids + plain(target, ids, limit).tokens)
        out = target.forward(text[None], taps=taps)
        texts.append((text, out.taps[:, 0].transpose(0, 1).flatten(1).clone(), out.final[0].clone(), len(ids)))
    tap_rms = torch.cat([seen.unflatten(1, (len(taps), -1)) for _, seen, _, _ in texts]).pow(2).mean((0, 2)).sqrt()
    init_scales(drafter, tap_rms, torch.cat([final for _, _, final, _ in texts]).pow(2).mean(0).sqrt())
    optimizer, block_size = torch.optim.AdamW(drafter.parameters(), lr=2e-3), drafter.config.block_size
    for step in range(steps):
        text, seen, _, start = texts[step % len(texts)]
        valid = torch.arange(len(text)) >= start
        anchors = geometry.draw_anchors(geometry.valid_anchors(valid), ANCHORS, rng)
        block = F.embedding(geometry.block_inputs(text, anchors, block_size, target.mask_token_id), target.embedding)
        labels, supervised = geometry.block_labels(text, valid, anchors, block_size)
        y = drafter(block.flatten(0, 1)[None], anchors[None], seen[None])[0]
        keep = supervised.flatten()
        loss = F.cross_entropy(F.linear(y[keep], target.head), labels.flatten()[keep])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def differing(target: Target, prompts: list[list[int]], runs: list[Run], plains: list[Run]) -> list[tuple[int, int, float]]:
    """(prompt, first place that differs from plain decoding, the target's margin there) of each text that differs."""
    found = []
    for i, (ids, run, text) in enumerate(zip(prompts, runs, plains, strict=True)):
        if (place := first_divergence(text.tokens, run.tokens)) is not None:
            found.append((i, place, margin(target, ids + text.tokens[:place])))
    return found


def ratios(runs: dict[str, list[Run]], rival: str, clock: str) -> tuple[float, float]:
    """ours / rival in tokens a second: the median over prompts, and pooled."""
    def rate(some: list[Run]) -> float:
        return sum(len(run.tokens) for run in some) / sum(getattr(run, clock) for run in some)
    each = (rate([own]) / rate([other]) for own, other in zip(runs[OURS], runs[rival], strict=True))
    return statistics.median(each), rate(runs[OURS]) / rate(runs[rival])


def summary(target: Target, prompts: list[list[int]], runs: dict[str, list[Run]]) -> dict[str, dict]:
    """Per way: rates, tau, how ours compares, texts that differ from plain decoding, blocks that differ from ours."""
    rows = {}
    for name, own in runs.items():
        tokens, lists = sum(len(run.tokens) for run in own), [run.accepted for run in own]
        drafted = any(lists)
        rows[name] = {
            "tokens": tokens, "tokens_per_s": tokens / sum(run.wall for run in own),
            "tokens_per_cpu_s": tokens / sum(run.cpu for run in own), "tau": tau_pooled(lists) if drafted else None,
            "ours_over_it_wall": ratios(runs, name, "wall"), "ours_over_it_cpu": ratios(runs, name, "cpu"),
            "differing_texts": differing(target, prompts, own, runs[PLAIN]),
            "unlike_accepted": sum(a != b.accepted for a, b in zip(lists, runs[OURS], strict=True)) if drafted else None}
    return rows


def table(rows: dict[str, dict], prompts: int, speeds: bool) -> Table:
    shown = Table()
    columns = ["way", "tau", "texts not\nas plain", "texts in other\nblocks than ours"]
    columns += ["tokens\na second", "ours / it, median\n(pooled), by clock", "\nby processor"] * speeds
    for column in columns:
        shown.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for name, row in rows.items():
        tau = "" if row["tau"] is None else f"{row['tau']:.2f}"
        blocks = "" if row["unlike_accepted"] is None or name == OURS else f"{row['unlike_accepted']} of {prompts}"
        pairs = ["" if name == OURS else "{:.2f}x ({:.2f}x)".format(*row[f"ours_over_it_{clock}"]) for clock in ("wall", "cpu")]
        shown.add_row(name, tau, f"{len(row['differing_texts'])} of {prompts}", blocks,
                      *([f"{row['tokens_per_s']:.1f}", *pairs] * speeds))
    return shown


def compare(name: str, folder: Path | None, file: Path, *, count: int, new_tokens: int, steps: int, hybrid: bool = False) -> dict:
    """Load a target and a drafter (or train one), run all ways, print the table -> the record."""
    target = load(name, dtype="float32")
    stock = Target(name, read(locate(name), torch.float32).to(target.device), target.tokenizer)
    limit, prompts = Limit(new_tokens, target.eos_ids), held_out(target, count, file)
    with tempfile.TemporaryDirectory() as scratch:
        which = f"{folder}"
        if folder is None:
            which = f"trained for {steps} steps on the answers to these very prompts"
            print(f"{name}: no drafter given, so one is {which}", file=sys.stderr)
            folder = Path(scratch) / "drafter"
            checkpoint.save(folder, trained(stock, prompts, limit, steps), {}, torch.float32)
        drafter, config, _ = checkpoint.load(folder, target.device, target.dtype)
        chosen = ways(target, stock, drafter.eval().requires_grad_(False), folder, limit)
    refused = refusal(chosen.pop(HF), prompts[0]) if hybrid else None
    rows = summary(target, prompts, interleaved(chosen, prompts))
    print(f"{name}, fp32, {torch.get_num_threads()} thread(s), {len(prompts)} prompts of {min(map(len, prompts))} to "
          f"{max(map(len, prompts))} tokens, at most {new_tokens} new; block {config.block_size}\ndrafter: {which}")
    Console(width=120).print(table(rows, len(prompts), speeds=not hybrid))
    for way, row in rows.items():
        for i, place, gap in row["differing_texts"]:
            print(f"  {way}: text {i} leaves plain decoding's at token {place}, where the target's margin is {gap:.3g}")
    if refused:
        print(f"  {HF}: {refused}")
    return {"target": name, "drafter": which, "block_size": config.block_size, "prompts": len(prompts), "new_tokens": new_tokens,
            "ways": rows, "refused": refused}


def refusal(way: Callable[[list[int]], Run], ids: list[int]) -> str:
    """What transformers says of a target that it will not speculate on."""
    try:
        way(ids)
    except ValueError as error:
        return str(error)
    return "it ran: this version does not refuse any more; run it with the others"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--drafter", type=Path, help="of SmolLM2; default: trained on the spot")
    parser.add_argument("--hybrid-drafter", type=Path, help="of the embedded target; default: trained on the spot")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--prompts-file", type=Path, default=PROMPTS)
    parser.add_argument("--train-steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    run = functools.partial(compare, count=settings.prompts, new_tokens=settings.new_tokens, steps=settings.train_steps)
    dense = run("smollm2", settings.drafter, settings.prompts_file)
    for rival in (ZLAB, HF):
        median = dense["ways"][rival]["ours_over_it_wall"][0]
        print(f"  ours / {rival}: {median:.2f}x, the reach is {REACH}x: {'met' if median >= REACH else 'NOT met'}")
    hybrid = run("embedded", settings.hybrid_drafter, settings.prompts_file, hybrid=True)
    print(json.dumps({"benchmark": "decode", "threads": settings.threads, "torch": torch.__version__,
                      "transformers": transformers.__version__, "reach": REACH, "dense": dense, "hybrid": hybrid}))


if __name__ == "__main__":
    main()
