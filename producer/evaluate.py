"""What a drafter is worth on real prompts: real decoding, batch 1, greedy, against plain decoding of the same prompts.

Beside the real acceptance stands the simulated one on the plain texts; they should agree (pitfall A2).  Texts that
speculation changed are listed with the target's own margin there, never hidden (S3).  Left out: which checkpoint and
which prompts these are; the caller knows and says."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.drafter import acceptance
from common.drafter.model import Drafter
from common.errors import UserError
from producer.speculate import Decoded, Limit, OnTokens, draft_head, first_divergence, margin, plain, speculate
from producer.target import Target

Prompts = list[tuple[str, list[int]]]           # (prompt id, token ids)

TIMED = 4                                       # prompts decoded plainly, too, in each evaluation, for its time


@dataclass(frozen=True)
class Plain:
    decoded: Decoded
    taps: Tensor            # [T, K*H] of prompt and text, target's dtype


class PlainTexts:
    """Plain decoding's text and taps of each prompt: the same for every drafter, so computed once and kept.

    Its time is not kept: evaluate() measures it anew beside the speculative one, so that a box that is busier or hotter
    now does not show up in eta.  Taps stay on the device: K*H numbers a token.  A prompt's id stands for its ids:
    ValueError where they differ.  between: as evaluate() has it."""

    def __init__(self, target: Target, limit: Limit, taps: tuple[int, ...], *, between: Callable[[], None] = lambda: None) -> None:
        self.target, self.limit, self.taps = target, limit, taps
        self._told: OnTokens = lambda _new: between()
        self._kept: dict[str, tuple[list[int], Plain]] = {}

    def __call__(self, prompt: str, ids: list[int]) -> Plain:
        if prompt not in self._kept:
            if not self._kept:
                plain(self.target, ids, Limit(min(3, self.limit.max_new_tokens)))   # what first use costs is not decoding's
            decoded = plain(self.target, ids, self.limit, on_tokens=self._told)
            text = torch.tensor([ids + decoded.tokens], device=self.target.device)
            taps = self.target.forward(text, taps=self.taps).taps
            self._kept[prompt] = ids, Plain(decoded, taps[:, 0].transpose(0, 1).flatten(1))
        known, kept = self._kept[prompt]
        if known != ids:
            raise ValueError(f"prompt {prompt}: other tokens than before")
        return kept


def evaluate(target: Target, drafter: Drafter, prompts: Prompts, texts: PlainTexts, *, seed: int,
             progress: Callable[[int, int], None] = lambda done, of: None, between: Callable[[], None] = lambda: None) -> dict:
    """The report: plain numbers, lists and dicts, as they travel.  seed: of the bootstrap alone.

    progress(prompts done, of) is called before each text, between() with each new token or block of one; an exception that either
    raises ends the evaluation.
    Raises ValueError for a drafter of other taps than the texts', UserError where no text is longer than one token.
    """
    if drafter.config.taps != texts.taps:
        raise ValueError(f"a drafter of taps {drafter.config.taps}, texts with taps {texts.taps}")
    plains, specs, simulated, timed, owed = [], [], [], [], 0
    told: OnTokens = lambda _new: between()
    for done, (prompt, ids) in enumerate(prompts):
        progress(done, len(prompts))
        kept = texts(prompt, ids)
        progress(done, len(prompts))
        owed += done % -(-len(prompts) // TIMED) == 0               # spread over the evaluation, so that both meet the same box
        if owed and len(kept.decoded.tokens) > 1:
            timed.append(plain(target, ids, texts.limit, on_tokens=told))
            owed -= 1
            progress(done, len(prompts))
        if not specs:
            speculate(target, drafter, ids, Limit(drafter.config.block_size))
        plains.append(kept)
        specs.append(speculate(target, drafter, ids, texts.limit, on_tokens=told))
        simulated.append(simulate(target, drafter, ids, kept, texts.limit))
    if not any(spec.accepted for spec in specs):
        raise UserError(f"none of {len(prompts)} held-out prompts gives a text of two tokens: there is nothing to measure")
    return _acceptance(drafter, prompts, specs, simulated, seed) | _speed(timed, specs) | _identity(target, prompts, plains, specs)


def fitted(result: dict, most: int) -> dict:
    """A result whose JSON has at most `most` bytes: the accepted lists are left out where it is larger, then divergences from the
    last; texts_left_out and divergences_left_out say how many were.  About 25 kB for 64 prompts of 128 tokens."""
    if len(json.dumps(result)) <= most:
        return result
    made = result | {"texts": None, "texts_left_out": len(result["texts"])}
    if len(json.dumps(made)) > most:
        kept = made["divergences"]
        room = most - len(json.dumps(made | {"divergences": [], "divergences_left_out": len(kept)}))
        sizes = np.cumsum([len(json.dumps(one)) + 2 for one in kept])
        fit = int((sizes <= room).sum())
        made |= {"divergences": kept[:fit], "divergences_left_out": len(kept) - fit}
    return made


def simulate(target: Target, drafter: Drafter, ids: list[int], text: Plain, limit: Limit) -> list[int]:
    """accepted of each block that the loop would meet on a plain text, from taps captured in one forward."""
    return acceptance.chain_walk(accepted_at(target, drafter, ids, text, limit), len(ids), len(ids) + len(text.decoded.tokens))


def accepted_at(target: Target, drafter: Drafter, ids: list[int], text: Plain, limit: Limit) -> list[int]:
    """Accepted at every anchor of a plain text, whether the loop would meet it or not (acceptance.simulate)."""
    whole, head = torch.tensor(ids + text.decoded.tokens, device=target.device), draft_head(target, drafter.shortlist)
    return acceptance.simulate(drafter, lambda tokens: F.embedding(tokens, target.embedding),
                               lambda y: head(y.to(target.dtype)), whole, text.taps, len(ids),
                               limit=len(ids) + limit.max_new_tokens)


def _acceptance(drafter: Drafter, prompts: Prompts, specs: list[Decoded], simulated: list[list[int]], seed: int) -> dict:
    """tau = tokens committed / verifies, the first token of each text left out (the prefill gives it).

    A block that the end of its text cuts counts with what it added.  Slots past that end were not judged: they are in
    no slot's rate, and trailing slots that no block judged are left out of the lists (None: no block got that far)."""
    accepted = [spec.accepted for spec in specs]
    blocks = [n for text in accepted for n in text]
    size = drafter.config.block_size
    room = [r for (_, ids), spec in zip(prompts, specs)
            for r in acceptance.rooms(spec.accepted, len(ids), len(ids) + len(spec.tokens), size)]
    given, cumulative = acceptance.slot_rates(blocks, room, size)
    judged = max(room)
    return {"prompts": len(prompts), "verifies": len(blocks), "tokens_decoded": sum(len(spec.tokens) for spec in specs),
            "tau": acceptance.tau_pooled(accepted), "tau_prompt": acceptance.tau_prompt(accepted),
            "tau_interval": list(acceptance.bootstrap_interval(accepted, acceptance.tau_pooled, np.random.default_rng(seed))),
            "tau_simulated": acceptance.tau_pooled(simulated), "accepted_histogram": np.bincount(blocks, minlength=size).tolist(),
            "acceptance_by_slot": cumulative[:judged],
            "acceptance_given_previous": [None if np.isnan(rate) else rate for rate in given[:judged]],
            "texts": [{"prompt": prompt, "accepted": text} for (prompt, _), text in zip(prompts, accepted)]}


def _speed(plains: list[Decoded], specs: list[Decoded]) -> dict:
    """Rates count decoding alone, after the first token: both sides prefill alike.  eta is pooled over all prompts, plain
    time per token over those that were decoded plainly in this evaluation (a plain step does not depend on the text).

    eta_theory is tau L_target / (T_t + T_d) of the measured parts, T_d with the drafter's context; what the formula leaves out
    parts it from eta: judging, the host's loop and the rollback (commit_seconds)."""
    tokens_plain, tokens_spec = (sum(len(d.tokens) - 1 for d in side) for side in (plains, specs))
    plain_seconds, spec_seconds = sum(p.decode_seconds for p in plains), sum(s.decode_seconds for s in specs)
    verifies = sum(len(spec.accepted) for spec in specs)
    draft, verify, commit = (sum(spec.seconds[part] for spec in specs for part in parts)
                             for parts in (("draft", "context"), ("verify",), ("judge", "loop", "rollback")))
    step = plain_seconds / tokens_plain
    return {"plain_tokens_per_s": 1 / step, "spec_tokens_per_s": tokens_spec / spec_seconds,
            "eta": step * tokens_spec / spec_seconds, "eta_theory": step * tokens_spec / (draft + verify), "step_seconds": step,
            "draft_seconds": draft / verifies, "verify_seconds": verify / verifies, "commit_seconds": commit / verifies,
            "prefill_seconds": sum(spec.seconds["prefill"] for spec in specs) / len(specs)}


def _identity(target: Target, prompts: Prompts, plains: list[Plain], specs: list[Decoded]) -> dict:
    divergences = []
    for (prompt, ids), text, spec in zip(prompts, plains, specs):
        position = first_divergence(text.decoded.tokens, spec.tokens)
        if position is not None:
            there = margin(target, ids + text.decoded.tokens[:position])
            divergences.append({"prompt": prompt, "position": position, "margin": there})
    return {"identical": len(prompts) - len(divergences), "divergences": divergences}
