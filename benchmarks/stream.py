"""Streaming's cost to the target: the same texts run bare, captured, and captured and encoded beside the target's work.

    python benchmarks/stream.py [--target embedded --target smollm2] [--tokens 512] [--pairs 9]

bare: one forward a text, the last row's logits, nothing read out.  captured: Target.capture, with all its checks.  streamed:
that, and protocol.codec on a second thread, the last text's bytes waited for.  One torch thread; each round runs the three
ways in turn over the same texts; the ratio to the bare forward is taken within its round, and the median and range shown.
The encoder wants a core of its own: where there is none free, the wall clock of streamed shows that.  Beside it stands the
processor time of the target's thread alone, which other work on the box hardly touches."""
from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from transformers.utils import logging

from common.capture import parse_taps
from producer.target import Target, load
from protocol import codec

TEXTS = 4                # a round: the encoder's work on one text hides behind the next one's forward
HASH = "0" * 64


def texts_of(target: Target, tokens: int) -> list[np.ndarray]:
    """Two of this project's source files, cut one after the other: real text, `tokens` of it each."""
    with open(__file__) as here, open(codec.__file__) as there:
        ids = np.array(target.tokenizer.encode(here.read() + there.read(), add_special_tokens=False), np.int32)
    ids = np.tile(ids, -(-TEXTS * tokens // len(ids)))
    return [ids[i * tokens:(i + 1) * tokens] for i in range(TEXTS)]


def bare(target: Target, taps: tuple[int, ...], texts: list[np.ndarray], pool: ThreadPoolExecutor) -> None:
    for ids in texts:
        target.forward(torch.from_numpy(ids).long()[None])


def captured(target: Target, taps: tuple[int, ...], texts: list[np.ndarray], pool: ThreadPoolExecutor) -> None:
    for ids in texts:
        target.capture(ids, np.ones(len(ids), bool), taps)


def streamed(target: Target, taps: tuple[int, ...], texts: list[np.ndarray], pool: ThreadPoolExecutor) -> None:
    jobs = [pool.submit(codec.encode, target.capture(ids, np.ones(len(ids), bool), taps), stream="0" * 32, seq=seq, contract=HASH)
            for seq, ids in enumerate(texts)]
    for job in jobs:
        job.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", action="append")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=9)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    for name in settings.target or ("embedded", "smollm2"):
        target = load(name)
        taps, texts, seconds = parse_taps("auto", target.n_layers), texts_of(target, settings.tokens), defaultdict(list)
        with ThreadPoolExecutor(1) as pool:
            for round_ in range(settings.pairs + 1):
                for way in (bare, captured, streamed):
                    begin, used = time.perf_counter(), time.thread_time()
                    way(target, taps, texts, pool)
                    if round_:                                           # round 0 warms up
                        seconds[way, "wall clock"].append(time.perf_counter() - begin)
                        seconds[way, "the target's thread"].append(time.thread_time() - used)
        print(f"{name} ({str(target.dtype).removeprefix('torch.')}, {len(taps)} taps): {TEXTS} texts of {settings.tokens} tokens, "
              f"bare {statistics.median(seconds[bare, 'wall clock']) * 1e3:.0f} ms, {settings.pairs} rounds")
        for way in (captured, streamed):
            for clock in ("wall clock", "the target's thread"):
                over = sorted(own / base - 1 for own, base in zip(seconds[way, clock], seconds[bare, clock]))
                print(f"  {way.__name__:>8} over bare, {clock:>19}: {statistics.median(over):+6.1%}"
                      f"  (from {over[0]:+.1%} to {over[-1]:+.1%})")


if __name__ == "__main__":
    main()
