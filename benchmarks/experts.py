"""Experts layer: the four ways to compute it, at the lengths of a plain step, a verify, a capture and a long prefill.

    python benchmarks/experts.py [--experts 256 --top-k 8 --hidden 2048 --width 512] [--tokens 1,16,512,4096] [--rounds 5]

One layer of Qwen3.5-MoE experts with random weights; every token chooses at random, so that more experts are awake than a trained
router wakes.  Each round visits every way once, in turn; shown are the median of each way's seconds over eager's in the same
round, and eager's median time.  On a GPU several layers take turns, so that no cache holds the weights of the last one, and
bfloat16 is the default; on a CPU a small layer in fp32 and one thread.  Ours (triton) is timed on a GPU alone: its interpreter
is no kernel.  batched_mm is left out where it would copy more weights than --most-copied GB.

The Triton kernels' speed has not been measured yet: no GPU was at hand when they were written."""
from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

from producer import experts as choice

USER = dict(experts=256, top_k=8, hidden=2048, width=512)
SMALL = dict(experts=32, top_k=4, hidden=256, width=64)
TURNS = 4                    # layers in turn on a GPU


def layer(args: argparse.Namespace, device: str, dtype: torch.dtype, seed: int) -> Qwen3_5MoeExperts:
    config = Qwen3_5MoeTextConfig(num_experts=args.experts, num_experts_per_tok=args.top_k, hidden_size=args.hidden,
                                  moe_intermediate_size=args.width)
    with torch.device(device):
        made = Qwen3_5MoeExperts(config).to(dtype).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for weight in made.parameters():
        weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
    return made


def ways(args: argparse.Namespace, made: Qwen3_5MoeExperts, tokens: int) -> list[str]:
    copied = choice.copied(made, args.top_k) * tokens // choice.PREFILL
    names = ["eager", "grouped_mm"] + ["batched_mm"] * (copied <= args.most_copied * 1e9)
    return names + ["triton"] * (not choice.no_triton(made, made.down_proj))


@torch.inference_mode()
def measure(args: argparse.Namespace, layers: list[Qwen3_5MoeExperts], tokens: int) -> dict[str, list[float]]:
    """Seconds of one layer, by way, a list with one entry a round; round 0 compiles and is left out."""
    weight, generator, seconds = layers[0].down_proj, torch.Generator().manual_seed(tokens), defaultdict(list)
    hidden = torch.randn(tokens, args.hidden, generator=generator).to(weight.device, weight.dtype)
    index = torch.rand(tokens, args.experts, generator=generator).topk(args.top_k, -1).indices.to(weight.device)
    share = torch.full((tokens, args.top_k), 1 / args.top_k, device=weight.device, dtype=weight.dtype)
    for round_ in range(args.rounds + 1):
        for name in ways(args, layers[0], tokens):
            choice.wait(weight.device)
            began = time.perf_counter()
            for made in layers:
                made.config._experts_implementation = name
                made(hidden, index, share)
            choice.wait(weight.device)
            if round_:
                seconds[name].append((time.perf_counter() - began) / len(layers))
    return seconds


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in (USER if gpu else SMALL).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--tokens", default="1,16,512,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16" if gpu else "float32")
    parser.add_argument("--most-copied", type=float, default=4.0 if gpu else 0.5, help="GB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if gpu else "cpu"
    layers = [layer(args, device, getattr(torch, args.dtype), seed) for seed in range(TURNS if gpu else 1)]
    table = Table(title=f"{args.experts} experts, {args.top_k} a token, hidden {args.hidden}, width {args.width}, {args.dtype}, "
                        f"{torch.cuda.get_device_name() if gpu else 'CPU, one thread'}: seconds over eager's")
    for head in ("tokens", "eager", *choice.NAMES[1:]):
        table.add_column(head, justify="right")
    for tokens in map(int, args.tokens.split(",")):
        seconds = measure(args, layers, tokens)
        ratios = [f"{statistics.median(own / base for own, base in zip(seconds[name], seconds['eager'])):.2f}" if name in seconds else "-"
                  for name in choice.NAMES[1:]]
        table.add_row(str(tokens), f"{statistics.median(seconds['eager']) * 1e3:.2f} ms", *ratios)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
