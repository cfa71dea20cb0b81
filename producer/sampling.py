"""From logits to one token: greedy or at a temperature, each row with randomness of its own.

A row draws one uniform number a token from its own generator, seeded by (seed, key), and reads it off its cumulative
distribution: what sits beside it in the batch, or the device, cannot change its numbers.  `verdict` judges drafted tokens,
so that what stands is distributed as if the target had drawn it alone; a Sampler does both for one text.
"""
from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common.drafter.acceptance import accepted_prefix
from common.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    temperature: float = 0.0        # 0: greedy, and the rest is not read
    top_k: int = 0                  # the k likeliest tokens; 0: all
    top_p: float = 1.0              # the smallest set of likeliest tokens that holds this probability; 1: all
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UserError(f"temperature {self.temperature:g} must be >= 0, top-k {self.top_k} >= 0, "
                            f"top-p {self.top_p:g} above 0 and up to 1")

    def generator(self, key: str) -> torch.Generator:
        """A row's own randomness, on the CPU; the same for the same seed and key everywhere."""
        digest = hashlib.sha256(f"{self.seed}:{key}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [..., V] -> float64 [..., V] that sum to 1; temperature first, then top-k, then top-p on what is left.

    Greedy gives 1 to the first of the largest.  Ties at the k-th place all stay.
    """
    if sampling.temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k, -1).values[..., -1:], float("-inf"))
    p = scaled.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        out = ordered.cumsum(-1) - ordered >= sampling.top_p                        # all before it already hold top_p
        p = p.masked_fill(out.gather(-1, order.argsort(-1)), 0)
        p = p / p.sum(-1, keepdim=True)
    return p


def uniforms(count: int, generator: torch.Generator) -> Tensor:
    """[count] float64 in [0, 1), in steps of 2^-24, on the CPU."""
    return torch.rand(count, generator=generator).double()


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """weights [..., V] float64, none negative, not all 0; uniform [...] in [0, 1) -> ids [...] int64, none of weight 0."""
    total = weights.cumsum(-1)
    return torch.searchsorted(total, uniform.to(total)[..., None] * total[..., -1:], right=True)[..., 0]   # first sum above it


def choose(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """logits [b, V] -> ids [b] int64.  One uniform number is drawn from each row's generator; none when greedy."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return draw(probabilities(logits, sampling), torch.cat([uniforms(1, g) for g in generators]))


def verdict(p: Tensor, q: Tensor, draft: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Speculative rejection sampling: Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1), Chen et al. 2023 (2302.01318).

    Draft token i, drawn from q_i, stands with probability min(1, p_i / q_i).  After the first that does not, or after the
    last, one more token is drawn from max(p - q, 0), q being 0 behind the last.  What results is distributed as p alone
    would have it, whatever q is: min(p, q) + max(p - q, 0) = p.  A q of one token with all the mass (greedy drafts) is a q.

    p        [..., v, V] float64: the target after each slot, rows sum to 1
    q        [..., v-1, V] float64: what each draft token was drawn from, rows sum to 1
    draft    [..., v-1] int64, with q > 0 at each
    uniform  [..., v] in [0, 1): one for each draft token, the last for the one more
    returns  accepted [...] int64, 0..v-1, and the token that follows them [...] int64
    """
    ids = draft[..., None]
    stands = uniform[..., :-1] * q.gather(-1, ids)[..., 0] < p[..., :-1, :].gather(-1, ids)[..., 0]
    accepted = stands.long().cumprod(-1).sum(-1)
    row = accepted[..., None, None].expand(*accepted.shape, 1, p.shape[-1])
    own = p.gather(-2, row)[..., 0, :]
    rest = (own - F.pad(q, (0, 0, 0, 1)).gather(-2, row)[..., 0, :]).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, own)    # p = q but for rounding: nothing is left of p - q
    return accepted, draw(rest, uniform[..., -1])


class Sampler:
    """How one text's tokens are chosen: a sampling, and the randomness of the text's key."""

    def __init__(self, sampling: Sampling, key: str = "") -> None:
        self._sampling, self._generator = sampling, sampling.generator(key)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """logits [n, V] -> ids [n] int64, and what they were drawn from [n, V]; None when greedy: all mass on those ids."""
        if self._sampling.temperature == 0:
            return logits.argmax(-1), None
        p = probabilities(logits, self._sampling)
        return draw(p, uniforms(len(logits), self._generator)), p

    def judge(self, logits: Tensor, draft: Tensor, q: Tensor | None) -> Tensor:
        """A verified block -> int64 [1 + v] on its device: how many draft tokens stand, then what the target says after each
        slot, as far as they stand and once more; what is behind means nothing.

        logits [v, V]; draft [v-1]; q [v-1, V] what it was drawn from, None: those tokens have all the mass
        """
        if self._sampling.temperature == 0:
            own = logits.argmax(-1)
            return torch.cat([accepted_prefix(draft, own)[None], own])
        p = probabilities(logits, self._sampling)
        q = F.one_hot(draft, p.shape[-1]).to(p) if q is None else q
        accepted, token = verdict(p, q, draft, uniforms(len(p), self._generator).to(p.device))
        return torch.cat([accepted[None], F.pad(draft, (0, 1)).scatter(0, accepted[None], token[None])])
