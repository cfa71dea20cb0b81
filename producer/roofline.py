"""How fast this machine could be (table 7): bytes that a forward must read over the rate at which it can copy, beside its time.

A plain step and a verify read every active weight once, the experts that they wake, the head, the keys and values of the text
so far and the Gated DeltaNet states; a draft reads the drafter, the head and its context.  Sizes are those of the loaded
parameters and of a real cache, in their own dtypes.  The floor is the larger of bytes / copy rate and arithmetic / matrix
product rate, both measured here, in this process and with its threads.  What lies above it is neither: operators that do not
reach the machine's rate, Python, launches.

It is a floor only for what comes from memory: a model that fits in a cache may beat it.  Left out, because small: rows of the
embedding, activations, logits, attention's and the delta rule's own arithmetic.  `expected` says the same for a model that is not
here, from its config alone."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM

from common.drafter.config import FULL, DrafterConfig
from common.drafter.model import Drafter
from producer import stopwatch
from producer.rollback import TargetCache
from producer.tables import digits, ms, percent, table
from producer.target import Target
from producer.woken import uniform

COPIED = 512 * 2 ** 20      # bytes, read once and written once: far above any cache
ROUNDS = 5
STATE_ITEM = 4              # bytes of a recurrent state's number: fp32 in every model (target-facts 1)
PARTS = ("dense", "experts", "head", "cache", "states")
SAYS = {"dense": "weights that all tokens use", "experts": "experts woken", "head": "output head", "cache": "keys and values",
        "states": "recurrent and conv states"}


@dataclass(frozen=True)
class Weights:
    """A target's weights in bytes, by how a forward reads them, and how many numbers an expert, head and the rest hold."""

    dense: int              # read by every forward; without embedding, head and experts
    head: int               # once, tied to the embedding or not
    expert: int             # ONE expert of each layer that has any, together
    dense_numbers: int
    head_numbers: int
    expert_numbers: int


def weights(named: Mapping[str, tuple[tuple[int, ...], int]], embedding: str, head: str) -> Weights:
    """named: parameter -> (shape, bytes a number), each tensor under one name; embedding and head: their names, equal where tied.

    Experts are three-dimensional, [E, ...], under a module `experts`.  ValueError for experts that lie otherwise."""
    sizes, numbers = dict.fromkeys(("dense", "head", "expert"), 0), dict.fromkeys(("dense", "head", "expert"), 0)
    for name, (shape, item) in named.items():
        kind, count = "dense", math.prod(shape)
        if name == head:
            kind = "head"
        elif name == embedding:
            continue
        elif ".experts." in name:
            if len(shape) != 3:
                raise ValueError(f"{name}: experts of shape {shape}, expected [E, ..., ...]")
            kind, count = "expert", count // shape[0]
        sizes[kind] += count * item
        numbers[kind] += count
    return Weights(**sizes, **{f"{kind}_numbers": count for kind, count in numbers.items()})


def named_shapes(model: nn.Module) -> tuple[dict[str, tuple[tuple[int, ...], int]], str, str]:
    """-> what `weights` takes.  Values are not looked at: the meta device will do."""
    params = dict(model.named_parameters())                         # a tied tensor once
    name = {id(weight): key for key, weight in params.items()}
    ends = [name[id(module.weight)] for module in (model.get_input_embeddings(), model.get_output_embeddings())]
    return {key: (tuple(weight.shape), weight.element_size()) for key, weight in params.items()}, *ends


@dataclass(frozen=True)
class Memory:
    """A text's cache in bytes: a token's keys and values over all layers, and the states, whatever the length."""

    token: int
    states: int


def memory(target: Target) -> Memory:
    """Of a real cache with a few tokens in it."""
    tokens = min(8, target.vocab_size)
    cache = TargetCache(target)
    cache.prefill(torch.arange(tokens, device=target.device)[None])
    held = cache.states()
    rows = sum(value.nbytes for key, value in held.items() if key.endswith(("keys", "values")))
    return Memory(rows // tokens, sum(value.nbytes for value in held.values()) - rows)


def memory_by_config(config, item: int) -> Memory:
    """The same by arithmetic from a transformers text config; item: bytes of a number in the model's dtype."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    token = 2 * config.num_key_value_heads * config.head_dim * item * sum(kind == "full_attention" for kind in kinds)
    if not (linear := sum(kind == "linear_attention" for kind in kinds)):
        return Memory(token, 0)
    keys, values = (heads * size for heads, size in ((config.linear_num_key_heads, config.linear_key_head_dim),
                                                     (config.linear_num_value_heads, config.linear_value_head_dim)))
    conv, recurrent = (2 * keys + values) * config.linear_conv_kernel_dim * item, values * config.linear_key_head_dim * STATE_ITEM
    return Memory(token, linear * (conv + recurrent))


def forward_bytes(shape: Weights, cache: Memory, woken: float, context: int, *, writes_states: bool) -> dict[str, float]:
    """PARTS of a forward's bytes.  woken: different experts a layer.  A plain step writes its states, too; a verify does not."""
    return {"dense": shape.dense, "experts": woken * shape.expert, "head": shape.head, "cache": context * cache.token,
            "states": cache.states * (1 + writes_states)}


def forward_flops(shape: Weights, rows: int, top_k: int) -> float:
    """A multiplication and an addition for each number of each row's weights: of top_k experts whatever others are awake."""
    return 2.0 * rows * (shape.dense_numbers + shape.head_numbers + top_k * shape.expert_numbers)


def draft_bytes(config: DrafterConfig, numbers: int, item: int, head: int, context: int) -> dict[str, float]:
    """A block and its context: all `numbers` of the drafter's weights, the head, and the context rows that its layers see."""
    rows = sum(context if kind == FULL else min(context, config.sliding_window) for kind in config.layer_types)
    return {"dense": numbers * item, "experts": 0, "head": head, "states": 0,
            "cache": rows * 2 * config.num_key_value_heads * config.head_dim * item}


def draft_flops(config: DrafterConfig, numbers: int, head_numbers: int) -> float:
    """At least: all slots through the layers, one token through fc, the drafted slots through the head."""
    fc = len(config.taps) * config.hidden_size ** 2
    return 2.0 * (config.block_size * (numbers - fc) + fc + (config.block_size - 1) * head_numbers)


def floor(read: Mapping[str, float], flops: float, copy_rate: float, flop_rate: float | None) -> dict:
    """-> bytes by part and in all, seconds by memory and by arithmetic (None without a rate), and the larger of them."""
    by_memory = sum(read.values()) / copy_rate
    by_arithmetic = flops / flop_rate if flop_rate else None
    return {"parts": dict(read), "bytes": sum(read.values()), "flops": flops,
            "by_memory": by_memory, "by_arithmetic": by_arithmetic, "floor": max(by_memory, by_arithmetic or 0.0)}


def woken_by(woken: dict, rows: int) -> float:
    """Mean of table 4 over blocks of at least `rows` rows, of their first `rows`; a dense target ({}) has none."""
    if not woken:
        return 0.0
    found = [row["mean"] for row in woken["by_rows"] if row["rows"] == rows]
    if not found:
        raise ValueError(f"no block of {rows} rows was heard, the longest had {woken['by_rows'][-1]['rows']}")
    return found[0]


def copy_rate(device: torch.device, size: int = COPIED) -> float:
    """Bytes a second, read and written both counted, of one large copy on the target's device, by its threads."""
    source = torch.ones(size // 4, device=device)
    sink = torch.empty_like(source)
    return 2 * source.nbytes / stopwatch.medians({"copy": lambda: sink.copy_(source)}, device, ROUNDS)["copy"]


def flop_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Multiplications and additions a second of one large square product in the target's dtype."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return 2 * n ** 3 / stopwatch.medians({"product": lambda: a @ a}, device, ROUNDS)["product"]


def measure(target: Target, drafter: Drafter, step_seconds: float, verify_seconds: float, draft_seconds: float, woken: dict,
            context_tokens: int, block_size: int, inside: Mapping[str, float] | None = None) -> dict:
    """Floors of a plain step, a verify of block_size rows and a draft with its context, beside their measured seconds.

    woken: table 4's record; context_tokens: where the times were taken; inside: seconds of step, verify, draft that were spent in
    operators, where that was measured.  The two rates are measured here."""
    shape, cache, config = weights(*named_shapes(target.model)), memory(target), drafter.config
    numbers = sum(weight.numel() for weight in drafter.parameters())
    rates = copy_rate(target.device), flop_rate(target.device, target.dtype)
    top_k, awake = woken.get("top_k", 0), woken_by(woken, block_size)
    drafted = 1.0 if drafter.shortlist is None else len(drafter.shortlist) / config.vocab_size          # of the head's rows
    forwards = {
        "step": floor(forward_bytes(shape, cache, top_k, context_tokens, writes_states=True),
                      forward_flops(shape, 1, top_k), *rates),
        "verify": floor(forward_bytes(shape, cache, awake, context_tokens, writes_states=False),
                        forward_flops(shape, block_size, top_k), *rates),
        "draft": floor(draft_bytes(config, numbers, drafter.fc.weight.element_size(), drafted * shape.head, context_tokens),
                       draft_flops(config, numbers, drafted * shape.head_numbers), *rates)}
    for name, seconds in (("step", step_seconds), ("verify", verify_seconds), ("draft", draft_seconds)):
        forwards[name] |= {"measured": seconds, "reached": forwards[name]["floor"] / seconds, "inside": (inside or {}).get(name)}
    return {"copy_rate": rates[0], "flop_rate": rates[1], "dtype": str(target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads() if target.device.type == "cpu" else None, "context_tokens": context_tokens,
            "block_size": block_size, "woken": {"step": top_k, "verify": awake}, "weights": asdict(shape), "forwards": forwards}


def expected(config, drafter: DrafterConfig, *, copy_rate: float, context_tokens: int,
             dtype: torch.dtype = torch.bfloat16) -> dict:
    """Arithmetic only, no weights: floors of a target known by its transformers text config; experts as if chosen at random.

    copy_rate: bytes a second, somebody's measurement -> the record of `measure` without what would have to be measured."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shape, cache, rows = weights(*named_shapes(model)), memory_by_config(config, dtype.itemsize), drafter.block_size
    experts, top_k = getattr(config, "num_experts", 0), getattr(config, "num_experts_per_tok", 0) if shape.expert else 0
    woken = {"step": top_k, "verify": uniform(experts, top_k, rows) if top_k else 0.0}
    numbers = sum(weight.numel() for weight in Drafter(drafter).parameters())
    forwards = {name: floor(forward_bytes(shape, cache, woken[name], context_tokens, writes_states=name == "step"),
                            forward_flops(shape, count, top_k), copy_rate, None)
                for name, count in (("step", 1), ("verify", rows))}
    forwards["draft"] = floor(draft_bytes(drafter, numbers, dtype.itemsize, shape.head, context_tokens),
                              draft_flops(drafter, numbers, shape.head_numbers), copy_rate, None)
    return {"copy_rate": copy_rate, "flop_rate": None, "dtype": str(dtype).removeprefix("torch."), "threads": None,
            "context_tokens": context_tokens, "block_size": rows, "woken": woken, "weights": asdict(shape), "forwards": forwards}


def show(measured: dict) -> Table:
    """A column for each forward; the measured rows only where there is a measurement (`expected` has none)."""
    forwards = [measured["forwards"][name] for name in ("step", "verify", "draft")]
    made = table("7. Roofline: what must be read, and what it takes", "MiB read", "plain step", f"verify of {measured['block_size']}",
                 "draft", note=_note(measured))
    for part in PARTS:
        if any(forward["parts"][part] for forward in forwards):
            made.add_row(SAYS[part] + _of_experts(part, measured["woken"]),
                         *(digits(f["parts"][part] / 2 ** 20 or None) for f in forwards))
    made.add_row("together", *(digits(f["bytes"] / 2 ** 20) for f in forwards))
    made.add_section()
    made.add_row("floor by memory, ms", *(ms(f["by_memory"]) for f in forwards))
    if measured["flop_rate"]:
        made.add_row("floor by arithmetic, ms", *(ms(f["by_arithmetic"]) for f in forwards))
    if "measured" in forwards[0]:
        made.add_row("measured, ms", *(ms(f["measured"]) for f in forwards))
        made.add_row("floor / measured", *(percent(f["reached"]) for f in forwards))
        rest = [None if f["inside"] is None else f["measured"] - f["inside"] for f in forwards]
        if any(value is not None for value in rest):
            made.add_row("in operators, ms", *(ms(f["inside"]) for f in forwards))
            made.add_row("Python and launches, ms", *map(ms, rest))
    return made


def _of_experts(part: str, woken: dict) -> str:
    return f" ({woken['step']} and {woken['verify']:.1f} a layer)" if part == "experts" else ""


def _note(measured: dict) -> str:
    note = f"Copy rate {measured['copy_rate'] / 1e9:.1f} GB/s, read and written counted"
    if measured["flop_rate"]:
        note += f"; matrix products {measured['flop_rate'] / 1e9:.0f} GFLOP/s in {measured['dtype']}"
    if measured["threads"]:
        note += f"; threads: {measured['threads']}"
    return f"{note}. Context: {measured['context_tokens']} tokens. What fits in a cache may beat the floor by memory."
