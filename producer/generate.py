"""The target answers prompts, many at once: our own loop over Target.forward, never the library's generate(), which
switches kernels and would be other arithmetic than the decoding that is measured.

Rows are padded on the left, with a mask and positions from 0 at each row's first token; a finished row leaves the
batch.  Left out: hidden states.  They are captured afterwards, one sequence alone, so that a neighbour cannot change them.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from producer.sampling import Sampling, choose
from producer.target import Target


@torch.inference_mode()
def answer(target: Target, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling, keys: list[str],
           *, between: Callable[[], None] = lambda: None) -> list[list[int]]:
    """prompts: token ids, not empty; keys: one a prompt, the source of its randomness (its id).
    between: called before each forward; an exception it raises ends the answers (a daemon that is to stop).

    returns the new tokens of each, in order: up to max_new_tokens, ended early by an end token, which is kept.
    The mask token ends an answer too, and stays in it: a capture of that text is then refused and counted (pitfall C4).
    In fp32 a batch gives the same tokens as each prompt alone, but for near ties (logits differ by rounding, 1e-4).
    """
    if len(keys) != len(prompts) or not all(prompts) or max_new_tokens < 1:
        raise ValueError("one key a prompt, no empty prompt, at least one token")
    answers: list[list[int]] = [[] for _ in prompts]
    if not prompts:
        return answers
    ends = target.eos_ids | {target.mask_token_id}
    generators = [sampling.generator(key) for key in keys]
    ids, mask, positions = (x.to(target.device) for x in pad_left(prompts))
    live, cache = list(range(len(prompts))), target.new_cache()
    while True:
        between()
        padded = mask if len(set(map(len, prompts))) > 1 else None          # equal lengths need no mask, and run faster
        logits = target.forward(ids, cache=cache, attention_mask=padded, position_ids=positions).logits[:, -1]
        chosen = choose(logits, sampling, [generators[row] for row in live])
        for row, token in zip(live, chosen.tolist()):
            answers[row].append(token)
        going = [k for k, row in enumerate(live)
                 if answers[row][-1] not in ends and len(answers[row]) < max_new_tokens]
        if not going:
            return answers
        if len(going) < len(live):
            rows = torch.tensor(going, device=target.device)
            cache.reorder_cache(rows)                                       # selects rows in every kind of layer, linear ones too
            chosen, mask, positions, live = chosen[rows], mask[rows], positions[rows], [live[k] for k in going]
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(live), 1)], 1)


def pad_left(prompts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask, positions, each [b, longest] int64: tokens at the right end, mask 1 there, positions from 0 there."""
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, prompts)])
    mask = torch.tensor([[0] * pad + [1] * len(prompt) for pad, prompt in zip(pads, prompts)])
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)
