"""Rollback: what it costs to keep n tokens of a verified 16-token block, on two small models of the user's architecture.

    python benchmarks/rollback.py [--rounds 5]

fold against its rivals in the same run: replay (each linear layer runs again over the accepted tokens) and re-forward (the
whole model does).  Random weights, fp32, one thread, 200 tokens of context; each round visits every way once, in turn.  Shown
are the median in ms, and the median share of the verify that ran just before it, in processor time of the one thread that
does the work, so that what else the box does counts less.  The shapes are the user's model (2048 wide, 32 value heads,
256 experts of 512) at a quarter and at half its width, with 8 layers and 64 experts, 8 a token."""
from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.utils import logging

from producer.rollback import RULES, TargetCache
from producer.target import Target

BLOCK, CONTEXT, VOCAB = 16, 200, 4096
KEPT = (1, 4, 8, 16)


def twin(hidden: int) -> Target:
    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=8, num_attention_heads=hidden // 128, num_key_value_heads=2,
        head_dim=128, linear_num_key_heads=hidden // 128, linear_num_value_heads=hidden // 64, linear_key_head_dim=128,
        linear_value_head_dim=128, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=hidden // 4,
        shared_expert_intermediate_size=hidden // 4, eos_token_id=0, pad_token_id=0, bos_token_id=None)
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB - 1)}, unk_token="0"))
    return Target(f"hidden {hidden}", Qwen3_5MoeForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=words))


def reforward(target: Target, cache: TargetCache, block: torch.Tensor, n: int) -> None:
    """The rival: forget the block, run the whole model over the accepted tokens.  (No snapshot is charged: writes were held back.)"""
    for layer in cache._attention:
        layer.crop(-block.shape[1])
    target.forward(block[:, :n], cache=cache._cache)
    cache._block, cache.length = 0, cache.length + n


def measure(target: Target, rounds: int) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """(way, n) -> seconds of (verify, what followed it); every round starts from the same 200 tokens of context."""
    generator, seconds = torch.Generator().manual_seed(0), defaultdict(list)
    prompt = torch.randint(1, VOCAB - 1, (1, CONTEXT), generator=generator)
    for round_ in range(rounds + 1):
        for n in KEPT:
            block = torch.randint(1, VOCAB - 1, (1, BLOCK), generator=generator)
            for way in (*RULES, "re-forward"):
                cache = TargetCache(target, "fold" if way == "re-forward" else way)
                cache.prefill(prompt)
                for _ in range(2):                                      # the first cycle of a text gathers the states
                    begin = time.thread_time()
                    cache.verify(block)
                    verified = time.thread_time()
                    if way == "re-forward":
                        reforward(target, cache, block, n)
                    else:
                        cache.commit(n)
                    end = time.thread_time()
                if round_:                                              # round 0 warms up
                    seconds[way, n].append((verified - begin, end - verified))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    for hidden in (512, 1024):
        seconds = measure(twin(hidden), rounds)
        verify = statistics.median(before for pairs in seconds.values() for before, _ in pairs)
        print(f"hidden {hidden}, 8 layers, 64 experts: verify of {BLOCK} tokens {verify * 1e3:.1f} ms, {rounds} rounds")
        print(f"{'kept':>6}" + "".join(f"{way:>22}" for way in (*RULES, "re-forward")))
        for n in KEPT:
            print(f"{n:>6}" + "".join(
                f"{statistics.median(own for _, own in seconds[way, n]) * 1e3:>12.2f} ms "
                f"{statistics.median(own / before for before, own in seconds[way, n]):>6.1%}" for way in (*RULES, "re-forward")))


if __name__ == "__main__":
    main()
