"""What a draft is worth: counted the same in the real loop and in its simulation on a text that is already there.

Peers report numbers that the loop never reaches (speculators#738: 87 against 45 %): they average over all anchors, where
the loop only meets those it hops to.  So the simulation walks the text as the loop does.  accepted is per block and
leaves the target's own token out; a block commits accepted + 1 tokens, always: at the text's end a draft token that
takes the place of the target's own is counted as that one, and sum(accepted + 1) is the number of tokens decoded."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from common.drafter import geometry
from common.drafter.model import Context, Drafter

UNKNOWN = -1          # accepted_at where no block was judged
SAME_TEXTS = {"float32": 0.02}          # real against simulated tau on the same texts: what rounding may part them by, of tau
SAME_TEXTS_ROUNDED = 0.1                # where the target computes in fewer bits, so that its texts and taps move with a block's length


def agreeing(draft: Tensor, truth: Tensor) -> Tensor:
    """draft, truth (..., n) token ids -> (...) int64: length of the agreeing prefix, 0..n."""
    return (draft == truth).long().cumprod(-1).sum(-1)


def accepted_prefix(draft: Tensor, target_argmax: Tensor) -> Tensor:
    """draft (v-1,) and the target's argmax over the block (v,) -> draft tokens to keep, () int64, 0..v-1, on their device.

    Row i of the argmax says what follows slot i, so it judges draft i; the row at the result is the target's own token."""
    if target_argmax.shape != (len(draft) + 1,):
        raise ValueError(f"{len(draft)} draft tokens need {len(draft) + 1} rows of argmax, got {tuple(target_argmax.shape)}")
    return agreeing(draft, target_argmax[:-1])


def block_slots(block_size: int, remaining: int) -> int:
    """Slots of the next block, the anchor's own included, when `remaining` tokens may still follow the anchor."""
    return min(block_size, remaining + 1)


def committed(accepted: int, remaining: int) -> int:
    """Tokens a block adds to a text that has room for `remaining` more after the anchor (by its limit or its stop token)."""
    return min(accepted + 1, remaining)


def chain_walk(accepted_at: Sequence[int], start: int, end: int) -> list[int]:
    """accepted_at (T,) for each position as anchor; first anchor `start`, text [0, end) -> accepted of each block met.

    Hops as the loop: the next anchor is a + committed; blocks are drafted while a token is missing (anchor + 1 < end).
    The last block's accepted is cut to what the text still takes, so sum(accepted + 1) == end - 1 - start."""
    walked, anchor = [], start
    while anchor + 1 < end:
        if accepted_at[anchor] < 0:
            raise ValueError(f"the walk meets anchor {anchor}, which was not judged")
        hop = committed(int(accepted_at[anchor]), end - 1 - anchor)
        walked.append(hop - 1)
        anchor += hop
    return walked


def rooms(accepted: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """For each block of a walk (real or simulated) the most that its accepted could have been, 0..B-1."""
    anchors = start + np.cumsum([0, *(a + 1 for a in accepted)])[:-1]
    return [min(block_size - 1, end - 2 - int(anchor)) for anchor in anchors]


@torch.no_grad()
def simulate(drafter: Drafter, embed: Callable[[Tensor], Tensor], head: Callable[[Tensor], Tensor], ids: Tensor, taps: Tensor,
             start: int, *, limit: int | None = None, chunk: int = 32) -> list[int]:
    """Draft at every anchor of one greedy text from its captured taps; the text's own tokens are the target's argmax.

    ids (T,), taps (T, K*H); embed: ids -> (..., H); head: (..., H) -> logits, of the drafter's shortlist where
    it has one.  start: first anchor (the first decoded token's position).  limit: tokens at which the loop would have
    ended the text, T (default) unless a stop token ended it sooner; it decides how many slots the last blocks had.
    chunk: anchors at a time (logits of chunk * B rows).
    Returns accepted_at (T,): agreeing tokens as far as the text goes; UNKNOWN before start and at the last position."""
    tokens, block_size = len(ids), drafter.config.block_size
    limit = tokens if limit is None else limit
    if not 1 <= start or limit < tokens:
        raise ValueError(f"start {start} must be at least 1, limit {limit} at least the text's {tokens} tokens")
    context = drafter.context(taps[None])
    accepted_at = [UNKNOWN] * tokens
    whole = max(start, min(tokens - 1, limit - block_size + 1))        # anchors below have all B slots
    groups = [torch.arange(a, min(a + chunk, whole)) for a in range(start, whole, chunk)]
    groups += [torch.tensor([a]) for a in range(whole, tokens - 1)]
    for anchors in groups:
        slots = block_slots(block_size, limit - 1 - int(anchors[-1]))
        draft = _drafts(drafter, embed, head, ids, anchors.to(ids.device), slots, context)
        labels, inside = geometry.block_labels(ids, torch.ones_like(ids, dtype=torch.bool), anchors.to(ids.device), slots)
        truth = torch.where(inside, labels, -1)[:, 1:]                 # past the text: agrees with nothing
        for anchor, accepted in zip(anchors.tolist(), agreeing(draft, truth).tolist(), strict=True):
            accepted_at[anchor] = accepted
    return accepted_at


def _drafts(drafter: Drafter, embed: Callable, head: Callable, ids: Tensor, anchors: Tensor, slots: int, context: Context) -> Tensor:
    """Greedy draft tokens (n, slots-1) of n blocks."""
    seen = [(k[:, :, :int(anchors[-1])], v[:, :, :int(anchors[-1])]) for k, v in context]
    block = embed(geometry.block_inputs(ids, anchors, slots, drafter.config.mask_token_id))
    y = drafter.blocks(block.flatten(0, 1)[None], anchors[None], seen)
    logits = head(y.unflatten(1, (len(anchors), slots))[0, :, 1:])
    if drafter.shortlist is None:
        return logits.argmax(-1)
    if logits.shape[-1] != len(drafter.shortlist):
        raise ValueError(f"a head of {logits.shape[-1]} tokens for a drafter of {len(drafter.shortlist)}")
    return drafter.shortlist[logits.argmax(-1)]


def tau_pooled(prompts: Sequence[Sequence[int]]) -> float:
    """accepted lists of several prompts -> tokens committed per verify, pooled over blocks.  ValueError without a block."""
    blocks = [accepted for prompt in prompts for accepted in prompt]
    if not blocks:
        raise ValueError("no block was verified")
    return float(np.mean(blocks)) + 1


def tau_prompt(prompts: Sequence[Sequence[int]]) -> float:
    """The mean of per-prompt means, as others report tau.  A prompt without a block has no mean and stays out."""
    means = [float(np.mean(prompt)) for prompt in prompts if len(prompt)]
    if not means:
        raise ValueError("no block was verified")
    return float(np.mean(means)) + 1


def slot_rates(accepted: Sequence[int], room: Sequence[int], block_size: int) -> tuple[list[float], list[float]]:
    """Per-slot acceptance for slots 1..B-1: (conditional: given all before it, cumulative: slot 1..j all accepted).

    accepted and room (see rooms) per block; a block counts for slot j where its room is j at least.  NaN: no block did."""
    got, room = np.asarray(accepted), np.asarray(room)
    conditional, cumulative = [], []
    for slot in range(1, block_size):
        judged = room >= slot
        reached, kept = int((judged & (got >= slot - 1)).sum()), int((judged & (got >= slot)).sum())
        conditional.append(kept / reached if reached else float("nan"))
        cumulative.append(kept / int(judged.sum()) if judged.any() else float("nan"))
    return conditional, cumulative


def bootstrap_interval(prompts: Sequence[Sequence[int]], statistic: Callable[[Sequence[Sequence[int]]], float],
                       rng: np.random.Generator, resamples: int = 1000, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of a statistic over prompts drawn with replacement (blocks of one prompt are not independent).

    Prompts without a block stay out, as in tau_prompt."""
    pool = [prompt for prompt in prompts if len(prompt)]
    if not pool:
        raise ValueError("no block was verified")
    draws = rng.integers(len(pool), size=(resamples, len(pool)))
    values = [statistic([pool[i] for i in draw]) for draw in draws]
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def parted(real: float, simulated: float, dtype: str) -> str:
    """Why two taus, measured and simulated on the same texts, cannot both be right, in words; "" where they agree (pitfall A2).

    dtype: the target's compute dtype, as a contract names it.  There is no excuse but rounding: any gap beyond it counts, either way."""
    allowed = SAME_TEXTS.get(dtype, SAME_TEXTS_ROUNDED)
    if abs(real - simulated) <= allowed * real:
        return ""
    return f"real tau {real:.2f} and {simulated:.2f} simulated on the same texts differ by more than {allowed:.0%}"
