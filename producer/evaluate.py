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


@dataclass(frozen=True)
class Measured:
    """One prompt: its plain text, the same decoded with the drafter, what a walk of the plain text says of it."""

    prompt: str             # its id
    ids: list[int]
    plain: Plain
    spec: Decoded
    simulated: list[int]    # accepted of each block
    timed: Decoded | None   # the plain text decoded beside the speculative one, where this prompt is one of the timed


def evaluate(target: Target, drafter: Drafter, prompts: Prompts, texts: PlainTexts, *, seed: int,
             progress: Callable[[int, int], None] = lambda done, of: None, between: Callable[[], None] = lambda: None) -> dict:
    """The report: plain numbers, lists and dicts, as they travel.  seed: of the bootstrap alone.

    progress(prompts done, of) is called before each text, between() with each new token or block of one; an exception that either
    raises ends the evaluation.
    Raises ValueError for a drafter of other taps than the texts', UserError where no text is longer than one token.
    """
    return report(target, drafter, measure(target, drafter, prompts, texts, progress=progress, between=between), seed)


def measure(target: Target, drafter: Drafter, prompts: Prompts, texts: PlainTexts, *,
            progress: Callable[[int, int], None] = lambda done, of: None, between: Callable[[], None] = lambda: None) -> list[Measured]:
    """Every prompt both ways.  As evaluate() has it."""
    if drafter.config.taps != texts.taps:
        raise ValueError(f"a drafter of taps {drafter.config.taps}, texts with taps {texts.taps}")
    found: list[Measured] = []
    owed, told = 0, lambda _new: between()
    for done, (prompt, ids) in enumerate(prompts):
        progress(done, len(prompts))
        kept = texts(prompt, ids)
        progress(done, len(prompts))
        owed += done % -(-len(prompts) // TIMED) == 0               # spread over the evaluation, so that both meet the same box
        timed = None
        if owed and len(kept.decoded.tokens) > 1:
            timed = plain(target, ids, texts.limit, on_tokens=told)
            owed -= 1
            progress(done, len(prompts))
        if not found:
            speculate(target, drafter, ids, Limit(drafter.config.block_size))
        spec = speculate(target, drafter, ids, texts.limit, on_tokens=told)
        found.append(Measured(prompt, ids, kept, spec, simulate(target, drafter, ids, kept, texts.limit), timed))
    return found


def report(target: Target, drafter: Drafter, found: list[Measured], seed: int) -> dict:
    if not any(one.spec.accepted for one in found):
        raise UserError(f"none of {len(found)} held-out prompts gives a text of two tokens: there is nothing to measure")
    step = step_seconds(found)
    return accepted(found, drafter.config.block_size, seed) | speed(found, step) | identity(target, found)


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


def accepted(found: list[Measured], size: int, seed: int) -> dict:
    """tau = tokens committed / verifies, the first token of each text left out (the prefill gives it).

    A block that the end of its text cuts counts with what it added.  Slots past that end were not judged: they are in
    no slot's rate, and trailing slots that no block judged are left out of the lists (None: no block got that far)."""
    lists = [one.spec.accepted for one in found]
    blocks = [n for text in lists for n in text]
    room = [r for one in found for r in acceptance.rooms(one.spec.accepted, len(one.ids), len(one.ids) + len(one.spec.tokens), size)]
    given, cumulative = acceptance.slot_rates(blocks, room, size)
    judged = max(room)
    return {"prompts": len(found), "verifies": len(blocks), "tokens_decoded": sum(len(one.spec.tokens) for one in found),
            "tau": acceptance.tau_pooled(lists), "tau_prompt": acceptance.tau_prompt(lists),
            "tau_interval": list(acceptance.bootstrap_interval(lists, acceptance.tau_pooled, np.random.default_rng(seed))),
            "tau_simulated": acceptance.tau_pooled([one.simulated for one in found]),
            "accepted_histogram": np.bincount(blocks, minlength=size).tolist(), "acceptance_by_slot": cumulative[:judged],
            "acceptance_given_previous": [None if np.isnan(rate) else rate for rate in given[:judged]],
            "texts": [{"prompt": one.prompt, "accepted": one.spec.accepted} for one in found]}


def step_seconds(found: list[Measured]) -> float:
    """Of one plain step, pooled over the texts that were decoded plainly in this evaluation: it does not depend on the text."""
    timed = [one.timed for one in found if one.timed is not None]
    return sum(text.decode_seconds for text in timed) / sum(len(text.tokens) - 1 for text in timed)


def speed(found: list[Measured], step: float) -> dict:
    """Rates count decoding alone, after the first token: both sides prefill alike.  eta is pooled over all prompts.  step: seconds.

    eta_theory is tau L_target / (T_t + T_d) of the measured parts, T_d with the drafter's context; what the formula leaves out
    parts it from eta: judging, the host's loop and the rollback (commit_seconds)."""
    specs = [one.spec for one in found]
    tokens, seconds = sum(len(spec.tokens) - 1 for spec in specs), sum(spec.decode_seconds for spec in specs)
    verifies = sum(len(spec.accepted) for spec in specs)
    draft, verify, commit = (sum(spec.seconds[part] for spec in specs for part in parts)
                             for parts in (("draft", "context"), ("verify",), ("judge", "loop", "rollback")))
    return {"plain_tokens_per_s": 1 / step, "spec_tokens_per_s": tokens / seconds,
            "eta": step * tokens / seconds, "eta_theory": step * tokens / (draft + verify), "step_seconds": step,
            "draft_seconds": draft / verifies, "verify_seconds": verify / verifies, "commit_seconds": commit / verifies,
            "prefill_seconds": sum(spec.seconds["prefill"] for spec in specs) / len(specs)}


def identity(target: Target, found: list[Measured]) -> dict:
    divergences = []
    for one in found:
        own = one.plain.decoded.tokens
        position = first_divergence(own, one.spec.tokens)
        if position is not None:
            divergences.append({"prompt": one.prompt, "position": position, "margin": margin(target, one.ids + own[:position])})
    return {"identical": len(found) - len(divergences), "divergences": divergences}
