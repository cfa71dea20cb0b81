"""bf16 numbers of one plane <-> the few bits that carry news, and the rest.

A bf16 number of a hidden state carries about 2.7 bits of news in its exponent and 7.9 in its sign and mantissa.  So the
exponent is made small, for the codec to compress, and the rest is kept as it is:

    pairs      The exponent minus its channel's base (a median, less BELOW) lies in 0..14 for all but 0.1 % of values: a nibble.
               15 says escape: position and true difference are listed apart.  A value of a piece's first half and one of its
               second half make one byte.  Half the symbols of exponent bytes: Huffman coding runs twice as fast both ways and
               comes nearer to the entropy.
    rest       Sign and mantissa.  The same two values share a word: the first's bits at their own places (REST), the second's
               with the bytes exchanged, so that each comes back by one mask.

Work goes piece by piece, so that intermediates stay in the cache.  Lossless for all 65536 patterns.  numpy frees the GIL.
The plain twin of split is in tests/protocol/test_codec.py.  Left out: big-endian machines.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

PIECE = 1 << 18                         # values coded at once: 2.4 MB of intermediates.  A quarter of it costs a third more time
BELOW = 10                              # of the 15 nibbles, how many lie below the channel's usual exponent
SAMPLE_ROWS = 3 ** 5                    # at most so many rows decide what is usual
ESCAPE = 15
# 0-d arrays: as operands they cost 0.6 us a call, numpy's scalars 1.0 and Python's 1.5.
FOUR, SEVEN = np.array(4, np.uint16), np.array(7, np.uint16)
REST, NIBBLE = np.array(0x807F, np.uint16), np.array(0x0780, np.uint16)     # sign and mantissa; the exponent's low four bits
SWAPPED = ">u2"                         # the bytes of a little-endian word, exchanged


class _Scratch(threading.local):
    """Intermediates of one piece, kept for each thread: fresh memory costs a page fault every 2000 values."""

    def __init__(self) -> None:
        self.bytes, self.nibbles, self.fifteens = (np.full(PIECE, ESCAPE, np.uint8) for _ in range(3))
        self.words, self.rest, self.base = (np.zeros(PIECE, np.uint16) for _ in range(3))


scratch = _Scratch()


def rows_per_piece(hidden: int) -> int:
    return max(1, PIECE // hidden)


def cut(plane: np.ndarray) -> Iterator[np.ndarray]:
    """Pieces of one plane (T, H): whole rows, flat, at most PIECE values."""
    rows = rows_per_piece(plane.shape[1])
    for start in range(0, len(plane), rows):
        yield plane[start:start + rows].reshape(-1)


def half_of(values: int) -> int:
    """Pairs for so many values: pair i is values i and half + i, zero behind the end.  A multiple of 8, for uint64 views."""
    return (values + 15) // 16 * 8


def channel_base(plane: np.ndarray) -> np.ndarray:
    """Exponent that counts as 0, per channel: (T, H) uint16 -> (H,) uint8, modulo 256.

    A median of some rows, less BELOW: the remedian (Rousseeuw and Bassett 1990, medians of three, of three, ...), which is
    whole-row minima and maxima and costs a quarter of np.partition down the columns.  The decoder need not know the rule.
    """
    count = SAMPLE_ROWS
    while count > len(plane):
        count //= 3
    rows = (plane[np.arange(count) * len(plane) // count] >> SEVEN).astype(np.uint8)
    while len(rows) > 1:
        a, b, c = rows.reshape(3, -1, rows.shape[1])
        rows = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return rows[0] - np.uint8(BELOW)


def tiled(base: np.ndarray, tokens: int) -> np.ndarray:
    """(H,) exponents -> one piece's worth of them, where bf16 has its exponent: uint16, a view of scratch."""
    rows, hidden = min(tokens, rows_per_piece(len(base))), len(base)
    out = scratch.base[:rows * hidden]
    np.copyto(out.reshape(rows, hidden), base.astype(np.uint16) << SEVEN)
    return out


def split(piece: np.ndarray, base: np.ndarray) -> tuple[np.ndarray, ...]:
    """n values, n exponent bases (tiled) -> pairs (half,) uint8, rest (half,) uint16, and the escapes: where (E,) uint32 in the
    piece, what (E,) uint8, the exponent's difference from its base.

    pairs and rest are views of scratch: compress them before the next call.
    """
    n, half = len(piece), half_of(len(piece))
    words, nibbles, differences = scratch.words[:2 * half], scratch.nibbles[:2 * half], scratch.bytes[:2 * half]
    np.subtract(piece, base, out=words[:n])                         # modulo 2**16: a borrow turns the sign, the sum turns it back
    words[n:] = 0
    np.right_shift(words, SEVEN, out=differences, casting="unsafe")             # the cast drops the sign
    np.minimum(differences, scratch.fifteens[:2 * half], out=nibbles)           # numpy's minimum with a scalar is 12 times slower
    where = np.flatnonzero(nibbles == ESCAPE)
    what = differences[where]
    low, high = nibbles[:half].view(np.uint64), nibbles[half:].view(np.uint64)
    np.left_shift(high, np.uint64(4), out=high)
    np.bitwise_or(low, high, out=low)
    np.bitwise_and(words, REST, out=words)
    swapped = scratch.rest[:half]
    np.copyto(swapped, words[half:].view(SWAPPED))
    np.bitwise_or(words[:half], swapped, out=swapped)
    return nibbles[:half], swapped, where.astype(np.uint32), what


def merge(pairs: bytes, rest: bytes, where: np.ndarray, what: np.ndarray, base: np.ndarray, *, out: np.ndarray) -> None:
    """The inverse of split, into out (n,) uint16; pairs and rest as bytes, where < n (checked by the caller)."""
    n, half = len(out), len(pairs)
    exponents, remainders = scratch.words[:2 * half], scratch.rest[:2 * half]
    first, second = exponents[:half], exponents[half:]
    np.copyto(second, np.frombuffer(pairs, np.uint8))
    np.left_shift(second, SEVEN, out=second)
    np.bitwise_and(second, NIBBLE, out=first)
    np.right_shift(second, FOUR, out=second)
    np.bitwise_and(second, NIBBLE, out=second)
    exponents[where] = what.astype(np.uint16) << SEVEN
    np.add(exponents[:n], base, out=exponents[:n])
    packed, second = np.frombuffer(rest, np.uint16), remainders[half:]
    np.bitwise_and(packed, REST, out=remainders[:half])
    np.copyto(second, packed.view(SWAPPED))
    np.bitwise_and(second, REST, out=second)
    np.add(exponents[:n], remainders[:n], out=out)
