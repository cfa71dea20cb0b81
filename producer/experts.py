"""Which code computes a target's experts: transformers' loop, its grouped_mm or batched_mm, or our Triton kernels (grouped).

The choice moves the last bits of every state, so the extraction contract holds it, and it is made once: by the person, by the
stream that goes on (`begun`), or, for a new one, by stop-watch (`auto`).  Implementations are registered and set through
transformers' public interface alone.  Left out: transformers' own switching while it generates (our loops never call
generate), and a choice by length: a text whose prefill and decoding ran different code could not be repeated by a capture."""
from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from common.contract import ExtractionContract
from common.errors import UserError
from producer import grouped
from protocol.store import META, SampleStore

NAMES = ("eager", "grouped_mm", "batched_mm", "triton")
BLOCK = 16               # tokens of a verify, where nobody says how many
ROUNDS = 3               # timed visits of each candidate and length, in turn
EQUAL = 0.03             # share of the fastest verify that counts as no difference: a stop-watch repeats no better
PREFILL = 4096           # tokens: what a capture may have (hsprod serve --max-tokens)
MOST_COPIED = 1 << 28    # bytes of weights that auto lets a prefill copy
TEXT = "def mean(values):\n    return sum(values) / len(values)\n\nThe quick brown fox asks: why is the sky blue? 12 + 30 = 42.\n"

ALL_EXPERTS_FUNCTIONS.register("triton", grouped.forward)


def found(model: nn.Module) -> list[nn.Module]:
    """The modules whose implementation can be chosen: experts stacked into one tensor.  [] on a dense model."""
    return [m for m in model.modules() if isinstance(getattr(m, "down_proj", None), nn.Parameter) and m.down_proj.ndim == 3]


def use(model: nn.Module, name: str, because: str = "") -> None:
    """Set it, or UserError: no experts to compute, or not here.  because: who wants it, for the message; else it is the option."""
    if not found(model):
        raise UserError(f"--experts {name}: this target has no experts to choose for; leave --experts out")
    if wrong := obstacle(model, name):
        raise UserError(f"{because or f'--experts {name}'}: {name} cannot run here: {wrong}; choose another of {', '.join(one for one in NAMES if one != name)}")
    model.set_experts_implementation(name)


def obstacle(model: nn.Module, name: str) -> str:
    """Why this model's experts cannot be computed so on its device and in its dtype; "" where they can.

    One token goes through one layer, so that what a library refuses at run time is known now.  grouped_mm is asked directly:
    where torch has none transformers silently loops, waiting for the device."""
    layer = found(model)[0]
    weight = layer.gate_up_proj if hasattr(layer, "gate_up_proj") else layer.down_proj
    if name == "triton" and (wrong := no_triton(layer, weight)):
        return wrong
    own = model.config._experts_implementation
    try:
        if name == "grouped_mm":
            _try_grouped_mm(weight)
        model.set_experts_implementation(name)
        if model.config._experts_implementation != name:
            return "transformers cannot switch this model's experts"
        with torch.inference_mode():
            chosen = torch.arange(_choices(model), device=weight.device)[None]
            layer(weight.new_zeros(1, layer.down_proj.shape[1]), chosen, torch.ones_like(chosen, dtype=weight.dtype))
    except Exception as error:                                       # whatever a library or a compiler raises is the answer
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    finally:
        model.set_experts_implementation(own)
    return ""


def no_triton(layer: nn.Module, weight: Tensor) -> str:
    """Why our kernels cannot run for this layer, one of whose weights is given; "" where they can.  Compiles nothing."""
    if weight.device.type != "cuda":
        return "Triton kernels run on a GPU"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed (torch for ROCm and CUDA brings it)"
    return grouped.unfit(layer)


def _try_grouped_mm(weight: Tensor) -> None:
    call = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if call is None:
        raise RuntimeError(f"torch {torch.__version__} has no grouped_mm")
    ones = weight.new_ones(1, 16, 16)
    call(ones[0], ones.transpose(-2, -1), offs=torch.tensor([16], dtype=torch.int32, device=weight.device))


def auto(model: nn.Module, tokenizer, *, block: int = BLOCK, say: Callable[[str], None]) -> None:
    """Set the fastest here, and say in one line which and how fast; nothing to do and to say on a dense model.

    block: tokens of a verify.  Times whole forwards of a text, so that the routers choose as they would: seconds on a large model.
    """
    if not (layers := found(model)):
        return
    out = {name: obstacle(model, name) for name in NAMES}
    if not out["batched_mm"] and (copies := copied(layers[0], _choices(model))) > MOST_COPIED:
        out["batched_mm"] = f"a prefill of {PREFILL} tokens would copy {copies / 1e9:.3g} GB of weights in each layer"
    left = tuple(name for name in NAMES if not out[name])
    words = (tokenizer(TEXT, add_special_tokens=False).input_ids * block)[:block]
    seconds = measure(model, left, torch.tensor([words], device=layers[0].down_proj.device))
    name = choose(seconds, block)
    model.set_experts_implementation(name)
    say(line(name, seconds, {name: why for name, why in out.items() if why}))


def _choices(model: nn.Module) -> int:
    config = model.config.get_text_config()
    return next((value for key in ("num_experts_per_tok", "top_k", "moe_topk") if isinstance(value := getattr(config, key, None), int)), 1)


def copied(layer: nn.Module, top_k: int) -> int:
    """Bytes of weights that batched_mm copies in one layer for a prefill: the projections of every row's expert."""
    per_row = sum(p[0].numel() * p.element_size() for p in layer.parameters() if p.ndim == 3)
    return PREFILL * top_k * per_row


@torch.inference_mode()
def measure(model: nn.Module, names: tuple[str, ...], ids: Tensor) -> dict[str, dict[int, float]]:
    """Median seconds of a forward of ids' [1, B] first token and of all: {name: {1: ..., B: ...}}.  Candidates take turns, after
    one visit each that is not timed (kernels are compiled).  The model's own implementation is set again."""
    own, lengths = model.config._experts_implementation, sorted({1, ids.shape[1]})
    taken: dict[str, dict[int, list[float]]] = {name: {length: [] for length in lengths} for name in names}
    for round_ in range(ROUNDS + 1):
        for name in names:
            model.set_experts_implementation(name)
            for length in lengths:
                wait(ids.device)
                began = time.perf_counter()
                model(input_ids=ids[:, :length], use_cache=False, logits_to_keep=1)
                wait(ids.device)
                if round_:
                    taken[name][length].append(time.perf_counter() - began)
    model.set_experts_implementation(own)
    return {name: {length: statistics.median(times) for length, times in by_length.items()} for name, by_length in taken.items()}


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose(seconds: dict[str, dict[int, float]], block: int) -> str:
    """The fastest verify, for a cycle is one verify of `block` tokens; among those within EQUAL of it the fastest plain step.  Pure."""
    fastest = min(times[block] for times in seconds.values())
    near = [name for name, times in seconds.items() if times[block] <= fastest * (1 + EQUAL)]
    return min(near, key=lambda name: seconds[name][1])


def line(name: str, seconds: dict[str, dict[int, float]], left_out: dict[str, str]) -> str:
    """What was chosen, the times, and what was not timed and why.  Pure."""
    lengths = " / ".join(f"T={length}" for length in next(iter(seconds.values())))
    times = ", ".join(f"{one} {' / '.join(f'{value * 1e3:.1f}' for value in by.values())} ms" for one, by in seconds.items())
    return f"experts: {name} ({lengths}: {times}{''.join(f'; not {one}: {why}' for one, why in left_out.items())})"


def begun(streams: Path, contract: ExtractionContract) -> str | None:
    """The implementation that the stream of this contract, the experts' left aside, began with; of several the one written to last.

    streams: the folder of streams, <name>/samples each; it may be missing.  UserError for a damaged stream."""
    kept = []
    for meta in streams.glob(f"*/samples/{META}"):
        theirs = ExtractionContract.from_dict(SampleStore(meta.parent, readonly=True).contract)
        name = theirs.versions.get("experts", "")
        if theirs == dataclasses.replace(contract, versions=contract.versions | {"experts": name}):
            kept.append((meta.parent.stat().st_mtime_ns, name))      # a folder's time: the last file that came or went
    return max(kept)[1] if kept else None
