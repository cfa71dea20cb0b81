"""Run folders like real ones, from a model of acceptance instead of a drafter: what the report is tried on before sweeps exist.

A draft token is accepted with a chance that grows with training and differs by arm, seed and prompt, so that what the report finds can
be compared with what was put in.  Rows have every field of the producer's and of the trainer's own."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

TOKENS_A_STEP = 929
TEXT = 128                                   # tokens of each text
CONTRACT = {"target": "embedded", "weights": "5a" * 32, "taps": [1, 2, 3, 4, 5], "dtype": "float32", "versions": {"transformers": "5.24.0"}}
PROMPT_IDS = [f"{i:02x}" * 32 for i in range(200)]


def accepted_of(rng: np.random.Generator, rate: float, block_size: int, tokens: int = TEXT) -> list[int]:
    """Blocks of one text: each slot is accepted with this chance, given the one before it; the last block is cut to the text."""
    accepted = (rng.random((tokens - 1, block_size - 1)) < rate).cumprod(1).sum(1)
    ends = np.cumsum(accepted + 1)
    last = int(np.argmax(ends >= tokens - 1))
    return [*accepted[:last].tolist(), int(accepted[last] - (ends[last] - (tokens - 1)))]


def texts(rng: np.random.Generator, logits: np.ndarray, block_size: int) -> list[list[int]]:
    return [accepted_of(rng, 1 / (1 + np.exp(-logit)), block_size) for logit in logits]


def cells(rng: np.random.Generator, *, arms: Sequence[float], seeds: int, prompts: int, by_seed: float, by_prompt: float) -> np.ndarray:
    """(arms, seeds, prompts) logits of acceptance: each arm's own level, what arms share, and what seeds and prompts add to one arm."""
    shared = rng.normal(0.8, 0.6, prompts) + rng.normal(0, 0.2, (seeds, 1))
    return np.array([level + shared + rng.normal(0, by_seed, (seeds, 1)) + rng.normal(0, by_prompt, prompts) for level in arms])


def measured(accepted: list[list[int]], block_size: int) -> dict:
    """What both kinds of row say of accepted lists."""
    blocks = np.array([n for text in accepted for n in text])
    taus = np.array([np.mean(text) for text in accepted]) + 1
    tau, error = float(blocks.mean() + 1), float(taus.std() / np.sqrt(len(taus)))
    return {"verifies": len(blocks), "tokens_decoded": TEXT * len(accepted), "tau": tau, "tau_prompt": float(taus.mean()),
            "tau_interval": [tau - 1.96 * error, tau + 1.96 * error], "acceptance_by_slot": [float((blocks >= j).mean()) for j in range(1, block_size)]}


def eval_row(step: int, accepted: list[list[int]], block_size: int, *, paired: bool = True, simulated: float | None = None,
             divergences: Sequence[dict] = (), prompts_hash: str = "cd" * 32) -> dict:
    said, prompts = measured(accepted, block_size), len(accepted)
    eta = said["tau"] * 0.49
    row = {"kind": "eval", "step": step, "tokens": step * TOKENS_A_STEP, "prompts": prompts} | said | {
        "tau_simulated": said["tau"] if simulated is None else simulated, "accepted_histogram": [0] * block_size,
        "acceptance_given_previous": said["acceptance_by_slot"], "plain_tokens_per_s": 127.0, "spec_tokens_per_s": 127.0 * eta, "eta": eta,
        "eta_theory": eta * 1.03, "step_seconds": 0.0079, "draft_seconds": 0.0016, "verify_seconds": 0.014, "commit_seconds": 0.0006,
        "prefill_seconds": 0.018, "identical": prompts - len(divergences), "divergences": list(divergences), "checkpoint": "ab" * 32,
        "prompts_hash": prompts_hash, "seconds": 6.3}
    return row | ({"texts": [{"prompt": name, "accepted": text} for name, text in zip(PROMPT_IDS, accepted)]} if paired else {})


def offline_row(step: int, accepted: list[list[int]], block_size: int) -> dict:
    return {"kind": "offline", "step": step, "tokens": step * TOKENS_A_STEP, "texts": len(accepted), "repeated_prompts": 0, "rows_cut": 0,
            **measured(accepted, block_size), "accepted": accepted, "seconds": 0.4}


def identity(arm: str, seed: int, *, block_size: int = 8, steps: int = 1000, contract: dict = CONTRACT, lr: float = 0.02) -> dict:
    return {"hsdraft": "0.1.0", "commit": "6410c9a", "python": "3.11.7", "torch": "2.13.0+cpu",
            "arm": {"name": arm, "question": f"Does {arm} accept more?", "beside": "ce_causal"}, "seed": seed, "contract": contract_hash(contract),
            "extraction": contract, "target": contract["target"],
            "drafter": {"block_size": block_size, "num_hidden_layers": 2, "is_causal": "causal" in arm},
            "plan": {"steps": steps, "sequences": 8, "lr": lr}}


def contract_hash(contract: dict) -> str:
    import hashlib
    return hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()


def write(folder: Path, identity: dict, rows: Sequence[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(identity))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def sweep(folder: Path, arms: dict[str, float], *, seeds: Sequence[int] = (0, 1, 2), prompts: int = 16, steps: Sequence[int] = (100, 250, 500, 750, 1000),
          block_size: int = 8, by_seed: float = 0.08, by_prompt: float = 0.2, paired: bool = True, offline: bool = True, real: bool = True) -> list[Path]:
    """One run an arm and seed under folder/runs.  arms: {name: logit of acceptance above the others when training is over}."""
    rng = np.random.default_rng(5)
    final = cells(rng, arms=list(arms.values()), seeds=len(seeds), prompts=prompts, by_seed=by_seed, by_prompt=by_prompt)
    made = []
    for a, arm in enumerate(arms):
        for s, seed in enumerate(seeds):
            rows = [{"kind": "step", "step": 10, "tokens": 9290, "loss": 5.6}]
            for step in steps:
                learnt = 3.2 * np.exp(-step / 300)                       # logits still missing
                if real:
                    rows.append(eval_row(step, texts(rng, final[a, s] - learnt, block_size), block_size, paired=paired))
                if offline:
                    rows.append(offline_row(step, texts(rng, final[a, s][:prompts] - learnt + 0.1, block_size), block_size))
            made.append(write(folder / "runs" / f"{arm}-s{seed}", identity(arm, seed, block_size=block_size, steps=max(steps)), rows))
    return made


FOUR = {"ce_causal": 0.0, "ce_bidi": -0.5, "kl_mixed_full": 0.35, "kl_mixed_uniform": 0.3}      # the author's arms, with made-up levels
