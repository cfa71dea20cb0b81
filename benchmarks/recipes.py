"""tau at equal tokens on one stored stream: an arm of ours against speculators 0.9.0's default DFlash recipe.

    python benchmarks/recipes.py [--store DIR] [--arm NAME ...] [--seeds 0,1,2] [--tokens 900000] [--out DIR] [--quick]

Both train the same network (layers, widths, block size 8) on the same captures in the same order, for the same number of
steps and tokens, with the same number of anchors a step, in fp32.  Theirs is trained by its own code (rival_speculators.py):
CE with D-PACE weights, all layers sliding and causal (window 2048), Muon at 1e-3 with weight decay, linear schedule.  Its
sequences of a step are packed into one row, as it does.  Two rows of it are shown: its defaults as they are, and the best learning
rate of --rival-lr, chosen at the first seed by the very tau that is compared, which flatters it.  Not as by its defaults: the packed
row's length and its anchors (512 in 8192 tokens there, here --anchors for each sequence of some 116), layers and block size.

tau is measured the same way for all: each drafter is saved in our format and read again, then walks the captures set aside
(acceptance.simulate), and drafts in hsprod's real loop on held-out prompts.  That the networks are the same is checked before,
on random weights.  Intervals: over prompts and seeds, both paired (trainer.evidence).  Runs that are in --out are not repeated."""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks import recorded, rivals
from benchmarks.recorded import Recording
from common.drafter import acceptance, checkpoint, geometry
from common.drafter.config import DrafterConfig, shape_for
from common.drafter.model import Drafter
from common.errors import UserError
from common.files import write_whole
from trainer import arms, config, daemon, evidence
from trainer.batch import concat_taps, make_batch
from trainer.optim import Optimizer, share_at
from trainer.run import draws
from trainer.step import train_step

WINDOW = 2048                    # speculators' default
SAME = 1e-4                      # largest difference of two fp32 forwards, relative to the largest output
Lists = list[list[int]]          # accepted of each block, prompt by prompt


def shape_of(recording: Recording, attention: str, **over: object) -> DrafterConfig:
    c = recording.contract
    return shape_for(c.hidden_size, c.vocab_size, c.n_layers, c.taps, c.mask_token_id, attention, **over)


def rival_shape(recording: Recording) -> DrafterConfig:
    return shape_of(recording, "causal", all_sliding=True, sliding_window=WINDOW)


def arm_of(text: str) -> arms.Arm:
    """NAME or NAME,field=value,...: the arm, or another made of it (arms.changed)."""
    name, *parts = text.split(",")
    fields = dict(part.split("=", 1) for part in parts if "=" in part)
    if len(fields) != len(parts) or not set(fields) <= set(arms.FIELDS):
        raise UserError(f"--arm {text}: write NAME or NAME,field=value,... with fields {', '.join(arms.FIELDS)}")
    return arms.changed(arms.named(name), **{field: _value(value) for field, value in fields.items()})


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- training

def train_ours(recording: Recording, arm: arms.Arm, recipe: config.Recipe, order: Lists, seed: int) -> tuple[Drafter, dict]:
    """As `hstrain run` does, on captures that are at hand."""
    shape = shape_of(recording, arm.attention, all_sliding=arm.all_sliding)
    drafter = Drafter(shape, generator=torch.Generator().manual_seed(seed))
    daemon.fit(SimpleNamespace(drafter=drafter, config=shape), recording.train)
    optimizer, begin, losses = Optimizer(drafter, recipe.optimizer, recipe.lr), time.monotonic(), []
    for step, wanted in enumerate(order):
        batch = make_batch([recording.train[i] for i in wanted], shape, arm, anchors=recipe.anchors, max_tokens=recipe.max_tokens,
                           generators=[draws(seed, step * len(wanted) + i) for i in range(len(wanted))])
        losses.append(train_step(drafter, optimizer, recording.embedding, recording.head, batch, arm, share_at(step, len(order)))["loss"])
    tail = losses[-50:]
    return drafter, {"seconds": time.monotonic() - begin, "loss": sum(tail) / len(tail), "settings": arm.to_dict() | vars(recipe)}


def train_theirs(recording: Recording, python: Path, captures: Path, order: Lists, seed: int, *, anchors: int, changed: dict,
                 threads: int) -> tuple[Drafter, dict]:
    """Their run in their Python; its weights in our network, whose names are the same."""
    shape, weights = rival_shape(recording), captures.with_name(f".theirs-{os.getpid()}.safetensors")
    with rivals.Worker(python, "benchmarks.rival_speculators", threads=threads) as worker:
        made = worker.ask("train", captures=str(captures), order=order, shape=shape.to_json(), seed=seed, anchors=anchors, changed=changed,
                          out=str(weights), threads=threads)
    drafter = Drafter(shape)
    drafter.load_state_dict(load_file(weights), strict=True, assign=True)
    weights.unlink()
    return drafter, made


def same_network(recording: Recording, python: Path, captures: Path) -> float:
    """Largest difference between their forward and ours on one capture and random weights, relative; RuntimeError above SAME."""
    shape, folder = rival_shape(recording), captures.parent
    weights, out = folder / ".random.safetensors", folder / ".hidden.safetensors"
    drafter = Drafter(shape, generator=torch.Generator().manual_seed(0))
    daemon.fit(SimpleNamespace(drafter=drafter, config=shape), recording.train)
    save_file({name: value.contiguous() for name, value in drafter.state_dict().items()}, weights)
    with rivals.Worker(python, "benchmarks.rival_speculators") as worker:
        worker.ask("hidden", captures=str(captures), index=0, shape=shape.to_json(), weights=str(weights), out=str(out), seed=0)
    theirs, capture = load_file(out), recording.train[0]
    anchors, ids = theirs["anchors"], torch.from_numpy(capture.ids).long()
    block = recording.embedding[geometry.block_inputs(ids, anchors, shape.block_size, shape.mask_token_id)].flatten(0, 1)[None]
    with torch.no_grad():
        ours = drafter(block, anchors[None], concat_taps(capture.taps)[None])[0]
    weights.unlink(), out.unlink()
    apart = float((ours - theirs["hidden"]).abs().max() / ours.abs().max())
    if not apart < SAME:
        raise RuntimeError(f"the two networks differ by {apart:.1e} on the same weights: nothing would be compared")
    return apart


# ---- judging

def walk_aside(drafter: Drafter, recording: Recording) -> Lists:
    """accepted of the blocks that the loop would meet on each capture set aside, from its first supervised token on."""
    out = []
    for capture in recording.aside:
        start, ids = int(np.argmax(capture.loss_mask)), torch.from_numpy(capture.ids).long()
        accepted = acceptance.simulate(drafter, lambda tokens: F.embedding(tokens, recording.embedding), lambda y: y @ recording.head.T,
                                       ids, concat_taps(capture.taps), start)
        out.append(acceptance.chain_walk(accepted, start, len(ids)))
    return out


class RealLoop:
    """hsprod's own decode loop on the demo's held-out prompts.  UserError where the target is not the recording's."""

    def __init__(self, recording: Recording, prompts: int, new_tokens: int) -> None:
        from producer import prompts as files
        from producer.speculate import Limit
        from producer.target import load
        contract = recording.contract
        self.target = load(contract.target, dtype=contract.dtype, device="cpu")
        if self.target.fingerprint != contract.weights:
            raise UserError(f"target {contract.target} here has other weights than the recorded one")
        held_out = sorted(files.split(files.read(recorded.PROMPTS), 0.1, files.SALT).held_out, key=lambda p: p.id)[:prompts]
        self.prompts = [files.render(self.target.tokenizer, p, contract.thinking) for p in held_out]
        self.limit = Limit(new_tokens, self.target.eos_ids)

    def __call__(self, drafter: Drafter) -> Lists:
        from producer.speculate import speculate
        return [speculate(self.target, drafter, ids, self.limit).accepted for ids in self.prompts]


# ---- comparing

def tau_ratio(ours: list[Lists], theirs: list[Lists], seeds: list[int], rng: np.random.Generator) -> dict:
    """tau of ours / theirs, each the mean over seeds of tau pooled over blocks; {ratio, interval, over_prompts, prompts}.

    ours, theirs: [seed][prompt] -> accepted of each block, the same seeds and prompts on both sides (ValueError).  Texts of one
    token have no block and stay out.  Intervals as in trainer.evidence: `interval` over prompts and seeds, both paired, None with
    one seed; `over_prompts` is of these very drafters.  They are those of ours - ratio x theirs, over theirs: first order."""
    a, b = _counts(ours), _counts(theirs)
    if a.shape != b.shape:
        raise ValueError(f"{a.shape[1:]} seeds and prompts against {b.shape[1:]}")
    kept = (a[1] > 0).all(0) & (b[1] > 0).all(0)
    a, b = evidence.Arm.of_cells("ours", seeds, *a[:, :, kept]), evidence.Arm.of_cells("theirs", seeds, *b[:, :, kept])
    ratio, tau = float(a.taus.mean() / b.taus.mean()), float(b.taus.mean())
    pair, = evidence.compare([a, evidence.Arm.of_cells("theirs", seeds, ratio * b.committed, b.blocks)], rng).pairs
    sign = 1 if pair.a == "ours" else -1
    def around(interval: tuple[float, float] | None) -> list[float] | None:
        return interval and sorted(ratio + sign * x / tau for x in interval)
    return {"ratio": ratio, "interval": around(pair.difference.interval), "over_prompts": around(pair.difference.over_prompts),
            "prompts": int(kept.sum())}


def _counts(lists: list[Lists]) -> np.ndarray:
    """(2, seeds, prompts): tokens committed and blocks."""
    return np.array([[[sum(p) + len(p) for p in seed] for seed in lists], [[len(p) for p in seed] for seed in lists]], float)


def compare(rows: dict[str, dict], seeds: list[int], rng_seed: int = 0) -> dict[str, dict]:
    """rows: name -> {"aside", "real": [seed][prompt] lists}; each of ours against each of speculators'."""
    out = {}
    for ours in (name for name in rows if not name.startswith("speculators")):
        for theirs in (name for name in rows if name.startswith("speculators")):
            out[f"{ours} / {theirs}"] = {key: tau_ratio(rows[ours][key], rows[theirs][key], seeds, np.random.default_rng(rng_seed))
                                         for key in ("aside", "real") if rows[ours][key] and rows[theirs][key]}
    return out


# ---- a run, once

class Runs:
    """Runs and what they were worth, kept in a folder: NAME-sSEED/ with the drafter, its record and result.json."""

    def __init__(self, folder: Path, recording: Recording, real: RealLoop | None) -> None:
        self.folder, self.recording, self.real = folder, recording, real

    def __call__(self, name: str, seed: int, asked: dict, train) -> dict:
        """asked: what the run is; one of that name that was asked otherwise is refused (UserError)."""
        folder, asked = self.folder / f"{name}-s{seed}", json.loads(json.dumps(asked))
        path = folder / "result.json"
        if path.exists():
            result = json.loads(path.read_text())
            if result["asked"] != asked:
                raise UserError(f"{folder} was another run; give another --out")
            return result
        drafter, made = train()
        checkpoint.save(folder, drafter, {"contract": self.recording.contract.hash, "name": name, "seed": seed} | made)
        drafter, _, _ = checkpoint.load(folder, "cpu", torch.float32)
        result = {"asked": asked, "made": made, "aside": walk_aside(drafter, self.recording), "real": self.real(drafter) if self.real else []}
        write_whole(path, json.dumps(result).encode())
        print(f"{name}, seed {seed}: tau aside {acceptance.tau_pooled(result['aside']):.3f}"
              + (f", real {acceptance.tau_pooled(result['real']):.3f}" if result["real"] else "") + f", {made['seconds']:.0f} s", file=sys.stderr)
        return result


def rows_of(options: argparse.Namespace, recording: Recording, python: Path, real: RealLoop | None) -> tuple[dict[str, dict], dict]:
    """Every row's lists by seed, and what else the record should say."""
    recipe = config.recipe_for(recording.contract.hidden_size)
    order = recorded.order([c.tokens for c in recording.train], tokens=options.tokens, sequences=recipe.sequences, replay=options.replay)
    captures, runs = options.out / "captures.safetensors", Runs(options.out, recording, real)
    recorded.dump(recording, captures)
    said = {"networks_differ_by": same_network(recording, python, captures), "steps": len(order),
            "tokens": sum(recording.train[i].tokens for row in order for i in row)}
    basis = {"contract": recording.contract.hash, "tokens": said["tokens"], "steps": len(order), "samples": len(recording.train)}
    rows: dict[str, dict] = {}

    def ours(arm: arms.Arm, seed: int) -> dict:
        return runs(arm.name, seed, basis | {"arm": arm.to_dict(), "recipe": vars(recipe)}, lambda: train_ours(recording, arm, recipe, order, seed))

    def theirs(name: str, seed: int, changed: dict) -> dict:
        anchors = recipe.anchors * recipe.sequences
        return runs(name, seed, basis | {"changed": changed, "anchors": anchors}, lambda: train_theirs(
            recording, python, captures, order, seed, anchors=anchors, changed=changed, threads=options.threads))

    for seed in options.seeds:
        for text in options.arm:
            _add(rows, arm_of(text).name, ours(arm_of(text), seed))
        _add(rows, "speculators", theirs("speculators", seed, {}))
    grid = {None: acceptance.tau_pooled(rows["speculators"]["aside"][0])}
    for rate in options.rival_lr:
        grid[rate] = acceptance.tau_pooled(theirs(f"speculators-lr{rate:g}", options.seeds[0], {"lr": rate, "muon_lr": rate})["aside"])
    best = max(grid, key=grid.get)
    for seed in options.seeds if best is not None else []:
        _add(rows, f"speculators-lr{best:g}", theirs(f"speculators-lr{best:g}", seed, {"lr": best, "muon_lr": best}))
    return rows, said | {"grid": {"default" if rate is None else f"{rate:g}": tau for rate, tau in grid.items()}}


def _add(rows: dict[str, dict], name: str, result: dict) -> None:
    row = rows.setdefault(name, {"aside": [], "real": [], "made": []})
    for key in ("aside", "real"):
        row[key] += [result[key]] if result[key] else []
    row["made"].append(result["made"])


def show(console: Console, rows: dict[str, dict], ratios: dict[str, dict], said: dict) -> None:
    table = Table("recipe", "tau, captures aside", "by seed", "tau, real loop", "by seed", "train s",
                  title=f"{said['tokens']:,} tokens in {said['steps']} steps; tau pooled over blocks, prompts and seeds")
    for name, row in rows.items():
        cells = []
        for key in ("aside", "real"):
            by_seed = [acceptance.tau_pooled(lists) for lists in row[key]]
            cells += [f"{acceptance.tau_pooled([p for lists in row[key] for p in lists]):.3f}", " ".join(f"{t:.2f}" for t in by_seed)] if by_seed else ["", ""]
        table.add_row(name, *cells, f"{np.mean([m['seconds'] for m in row['made']]):.0f}")
    console.print(table)
    for pair, found in ratios.items():
        console.print(f"{pair}: " + ", ".join(f"{ {'aside': 'captures aside', 'real': 'real loop'}[key]} {_said(x)}" for key, x in found.items()))
    console.print("speculators' learning rates at the first seed, tau on captures aside: " + ", ".join(f"{k} {v:.3f}" for k, v in said["grid"].items()))


def _said(x: dict) -> str:
    interval, what = (x["interval"], "") if x["interval"] else (x["over_prompts"], " over prompts alone, one seed")
    span = f"95 % {interval[0]:.3f} to {interval[1]:.3f}{what}" if interval else "one text"
    return f"{x['ratio']:.3f}x ({span}; {x['prompts']} texts)"


def numbers(kind: type):
    return lambda text: [kind(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--store", type=Path, help="--state-dir of an hstrain run that holds a stream; default: one is recorded into --out")
    parser.add_argument("--target", default="embedded", help="what is recorded")
    parser.add_argument("--arm", action="append", help="of ours: NAME or NAME,field=value,...; may be given again")
    parser.add_argument("--seeds", type=numbers(int), default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=900_000, help="trained on, re-reads included")
    parser.add_argument("--replay", type=int, default=config.Run.__dataclass_fields__["replay"].default)
    parser.add_argument("--rival-lr", type=numbers(float), default=[3e-3, 1e-2, 3e-2], help="tried beside its default")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts of the real loop; 0: none")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("demo/recipes"))
    parser.add_argument("--quick", action="store_true", help="two seeds, few steps: does it run?")
    parser.add_argument("--python", type=Path, help="a Python that has speculators; default: one made in the cache folder")
    options = parser.parse_args()
    options.arm = options.arm or ["ce_causal"]
    if options.quick:
        options.seeds, options.tokens, options.rival_lr, options.prompts, options.new_tokens = [0, 1], 12_000, [1e-2], 4, 32
    torch.set_num_threads(options.threads)
    python = options.python or rivals.environment()
    store = options.store or options.out / "stream"
    if options.store is None and not (store / "assets").exists():
        recorded.record(store, options.target)
    recording = recorded.read(store)
    real = RealLoop(recording, options.prompts, options.new_tokens) if options.prompts else None
    rows, said = rows_of(options, recording, python, real)
    ratios = compare(rows, options.seeds)
    said |= {"train": len(recording.train), "aside": len(recording.aside), "seeds": options.seeds, "target": recording.contract.target}
    write_whole(options.out / "recipes.json", json.dumps({"said": said, "rows": rows, "ratios": ratios}, indent=1).encode())
    show(Console(width=130), rows, ratios, said)
    Console(width=130).print(f"the same network: outputs differ by {said['networks_differ_by']:.0e} on the same weights; "
                             f"record: {options.out / 'recipes.json'}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
