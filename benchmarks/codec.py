"""The codec against its rivals on real hidden states: size, and speed of one thread.

    python benchmarks/codec.py [--tokens 96,512,2048] [--rounds 15]         (needs pip install zipnn blosc2)

SmolLM2-135M in bf16 reads argparse.py of the standard library; 8 taps and the final states are what each codec gets.  Each
round visits every codec once, in turn; medians of CPU seconds are shown (wall time on a busy box measures its neighbours),
and each round trip is compared once.  Ours makes and checks whole samples (ids, header, a checksum of every byte); the others get the
planes' bytes and check nothing.  Bounds: 16 bits by the order-0
entropy of exponent, sign and mantissa, measured on these very values; the last line counts the exponents of each channel and
plane apart, which flatters (a few hundred values a histogram)."""
from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import blosc2
import numpy as np
import torch
import zipnn
import zstandard
from rich.console import Console
from rich.table import Table

from common.capture import Capture, auto_taps
from producer.target import load
from protocol import codec


def real_capture(tokens: int) -> Capture:
    target = load("smollm2", dtype="bfloat16", device="cpu")
    with open(argparse.__file__, encoding="utf-8") as file:
        ids = target.tokenizer(file.read())["input_ids"][:tokens]
    return target.capture(ids, [True] * len(ids), auto_taps(30, 8))


def head_of(capture: Capture, tokens: int) -> Capture:
    probes = capture.probe_rows < tokens
    return Capture(capture.ids[:tokens], capture.loss_mask[:tokens], np.ascontiguousarray(capture.taps[:, :tokens]),
                   capture.final[:tokens], capture.probe_rows[probes], capture.probe_tokens[probes])


def rivals(capture: Capture) -> dict[str, tuple[Callable, Callable]]:
    """name -> (encode, decode), all on the same values.  encode gets a copy of the bytes, for ZipNN writes into its input."""
    states = np.concatenate([capture.taps, capture.final[None]])
    zip_ = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)
    zstd, unzstd = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def blosc(*filters: blosc2.Filter) -> tuple[Callable, Callable]:
        blosc2.set_nthreads(1)
        settings = dict(typesize=2, codec=blosc2.Codec.ZSTD, clevel=1, nthreads=1, filters=list(filters), filters_meta=[0] * len(filters))
        return lambda _: blosc2.compress2(states, **settings), lambda data: blosc2.decompress2(data, nthreads=1)

    def planes(_: bytearray) -> bytes:
        return zstd.compress(np.ascontiguousarray(states.view(np.uint8).reshape(-1, 2).T))

    def unplanes(data: bytes) -> np.ndarray:
        return np.ascontiguousarray(np.frombuffer(unzstd.decompress(data), np.uint8).reshape(2, -1).T)

    def ours(_: bytearray) -> bytes:
        return codec.encode(capture, stream="bench", seq=0, contract="0" * 64)

    return {"hsdraft": (ours, lambda data: codec.decode(data).capture),
            "ZipNN": (zip_.compress, zip_.decompress),
            "blosc2 bitshuffle, zstd 1": blosc(blosc2.Filter.BITSHUFFLE),
            "blosc2 shuffle, bytedelta, zstd 1": blosc(blosc2.Filter.SHUFFLE, blosc2.Filter.BYTEDELTA),
            "zstd 1 of byte planes": (planes, unplanes),
            "zstd 1": (zstd.compress, unzstd.decompress)}


def same(capture: Capture, got: object) -> bool:
    if isinstance(got, Capture):
        return all(np.array_equal(getattr(got, name), getattr(capture, name)) for name in ("ids", "loss_mask", "taps", "final"))
    return bytes(memoryview(got).cast("B")) == capture.taps.tobytes() + capture.final.tobytes()


def measure(capture: Capture, rounds: int) -> dict[str, tuple[float, float, float]]:
    """name -> ratio, encode and decode in GB/s of bf16."""
    pairs, raw = rivals(capture), capture.taps.tobytes() + capture.final.tobytes()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    lengths = {}
    for round_ in range(rounds + 1):
        for name, (encode, decode) in pairs.items():
            scratch = bytearray(raw)
            begin = time.process_time()
            data = encode(scratch)
            middle = time.process_time()
            got = decode(data)
            end = time.process_time()
            lengths[name] = len(data)
            if round_:                                                  # the first warms caches and allocators
                seconds[name].append((middle - begin, end - middle))
            elif not same(capture, got):
                raise AssertionError(f"{name}: the round trip is not exact")
    return {name: (len(raw) / lengths[name], *(len(raw) / statistics.median(way) / 1e9 for way in zip(*seconds[name])))
            for name in pairs}


def entropy(counts: np.ndarray) -> float:
    """(..., symbols) counts -> bits a symbol, pooled over the histograms."""
    total = counts.sum(-1, keepdims=True)
    return float((counts * np.log2(np.where(counts, total / np.maximum(counts, 1), 1))).sum() / counts.sum())


def bounds(capture: Capture) -> dict[str, float]:
    states = np.concatenate([capture.taps, capture.final[None]])
    exponent = (states >> 7 & 255).astype(np.int64)
    rest = (states >> 8 & 128 | states & 127).astype(np.int64)
    exponents, rests = (entropy(np.bincount(x.ravel(), minlength=256)) for x in (exponent, rest))
    planes, _, hidden = states.shape
    channel = np.arange(planes)[:, None, None] * hidden + np.arange(hidden)
    apart = entropy(np.bincount((channel * 256 + exponent).ravel(), minlength=planes * hidden * 256).reshape(-1, 256))
    return {f"bound: exponent {exponents:.2f} + rest 8 bits": 16 / (exponents + 8),
            f"bound: exponent {exponents:.2f} + rest {rests:.2f}": 16 / (exponents + rests),
            f"bound: exponent, by channel, {apart:.2f} + rest {rests:.2f}": 16 / (apart + rests)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="96,512,2048", help="lengths of the sequence")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [int(part) for part in options.tokens.split(",")]
    capture = real_capture(max(lengths))
    for tokens in lengths:
        part = head_of(capture, tokens)
        results = measure(part, options.rounds)
        _, encode, decode = results["ZipNN"]
        megabytes = (part.taps.nbytes + part.final.nbytes) / 1e6
        table = Table("codec", "ratio", "encode GB/s", "of ZipNN", "decode GB/s", "of ZipNN",
                      title=f"{part.tokens} tokens, 8 taps + final state, {megabytes:.1f} MB, one thread")
        for name, (ratio, en, de) in results.items():
            table.add_row(name, f"{ratio:.3f}", f"{en:.2f}", f"{en / encode:.2f}x", f"{de:.2f}", f"{de / decode:.2f}x")
        for name, ratio in bounds(part).items():
            table.add_row(name, f"{ratio:.3f}", "", "", "", "")
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
