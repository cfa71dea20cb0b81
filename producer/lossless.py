"""Table 6: does speculation change the text?  Where it does, how near was the choice, and how noisy is the target by itself?

In fp32 identity is claimed.  In bf16 a block and single steps round differently, so what can be claimed is that the text
departs from single steps no more often, nor at clearer choices, than the target's own forwards of two shapes do:

    floor         along each plain text: places where one forward of the whole text would choose another token than the
                  single step did.  No drafter has a part in it.
    speculative   along each speculative text: places where a single step would choose another token than the text has.
                  A text equal to the plain one has none, for single steps wrote it; the others are run through one by one.

A margin is by how much the one prefers its own choice to the text's, in logits.  Left out: whether a margin is small; the
floor beside it is the measure."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.table import Table
from torch import Tensor

from producer.pairs import Pair, Progress
from producer.speculate import first_divergence, margin
from producer.tables import digits, percent, table
from producer.target import Target


@torch.inference_mode()
def measure(target: Target, pairs: Sequence[Pair], progress: Progress = lambda done, of: None) -> dict:
    differing, floor, spec = [], [], []
    for i, pair in enumerate(pairs):
        progress(i, len(pairs))
        own, got = pair.plain.decoded.tokens, pair.spec.decoded.tokens
        floor.append(departures(whole(target, pair.ids, own), own))
        place = first_divergence(own, got)
        spec.append(torch.zeros(len(got)) if place is None else departures(steps(target, pair.ids, got), got))
        if place is not None:
            near = margin(target, pair.ids + own[:place])
            differing.append({"prompt": pair.prompt, "position": place, "of": len(own), "margin": near})
    return {"prompts": len(pairs), "identical": len(pairs) - len(differing), "dtype": str(target.dtype).removeprefix("torch."),
            "differing": differing, "floor": summed(floor), "speculative": summed(spec)}


def whole(target: Target, ids: list[int], text: list[int]) -> Tensor:
    """[len(text), V]: what one forward of the whole says before each token of the text."""
    return target.forward(torch.tensor([ids + text[:-1]], device=target.device), logits_to_keep=len(text)).logits[0]


def steps(target: Target, ids: list[int], text: list[int]) -> Tensor:
    """[len(text), V]: what plain decoding, made to follow the text, says before each of its tokens."""
    cache, tokens = target.new_cache(), torch.tensor([ids + text[:-1]], device=target.device)
    rows = [target.forward(tokens[:, :len(ids)], cache=cache).logits[0, -1]]
    rows += [target.forward(token, cache=cache).logits[0, -1] for token in tokens[:, len(ids):].split(1, 1) if token.numel()]
    return torch.stack(rows)


def departures(logits: Tensor, text: list[int]) -> Tensor:
    """logits [n, V] before each of n tokens -> [n] float: by how much another token is preferred; 0 where the text's is first."""
    logits = logits.float()
    return (logits.amax(-1) - logits.gather(-1, torch.tensor(text, device=logits.device)[:, None])[:, 0]).cpu()


def summed(gaps: Sequence[Tensor]) -> dict:
    joined = torch.cat(list(gaps))
    return {"places": len(joined), "departures": int((joined > 0).sum()), "largest_margin": float(joined.max())}


def show(measured: dict) -> list[Table]:
    same = f"{measured['identical']} of {measured['prompts']} texts identical to plain decoding, {measured['dtype']}"
    note = ("Departures: places where single steps (speculative text) or one forward of the whole (plain text: the noise floor) prefer "
            "another token; margins in logits.")
    if measured["dtype"] != "float32":
        note += " Not fp32: identity is not claimed, only no more departures, and none clearer, than the floor's."
    first = table(f"6. Lossless: {same}", "text", "places", "departures", "share", "largest margin", note=note)
    for key, name in (("speculative", "speculative / single steps"), ("floor", "plain / whole (noise floor)")):
        row = measured[key]
        first.add_row(name, str(row["places"]), str(row["departures"]), percent(row["departures"] / row["places"]),
                      digits(row["largest_margin"]) if row["departures"] else "none")
    if not measured["differing"]:
        return [first]
    second = table("Texts that differ", "prompt", "first other token", "of", "margin there, logits")
    for row in measured["differing"]:
        second.add_row(row["prompt"][:12], str(row["position"]), str(row["of"]), digits(row["margin"]))
    return [first, second]
