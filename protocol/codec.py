"""Capture <-> bytes: one self-describing byte string is one sample, one file and one payload on the wire.

A bf16 number of a hidden state carries about 2.7 bits of news in its exponent and 7.9 in its sign and mantissa.  So the
exponent is squeezed and the rest is stored as it is:

    exponent   minus its channel's base (a median, less BELOW) lies in 0..14 for all but 0.1 % of values: a nibble.  15 says
               escape: position and true difference stand in the side buffer.  A value of a piece's first half and one of
               its second half make one byte, and zstd held to Huffman codes the bytes.  Half the symbols of exponent
               bytes: twice the speed both ways, and nearer to the entropy.
    rest       sign and mantissa.  The same two values share a word: the first's bits at their own places (0x807F), the
               second's with the bytes exchanged, so each comes back by one mask.  zstd stores it (raw blocks, a checksum).

zstd's content checksum (xxh64) guards each frame; it costs a third of zlib.crc32.  Work goes piece by piece, so that
intermediates stay in the cache.  Lossless for all 65536 patterns.  The layout, byte by byte, is in protocol/README.md.
Left out: lossy modes, and more than one thread (callers encode samples side by side; numpy and zstd free the GIL).
"""
from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields

import msgpack
import numpy as np
import zstandard

from common.capture import Capture
from common.errors import CaptureError, CorruptError

MAGIC = b"hsdraft\0"
VERSION = 1
PREFIX = struct.Struct("<8sHHII")       # magic, version, zero, header length, crc32 of all that comes before it and the header
MAX_HEADER = 1024                       # a header is about 250 bytes
MAX_PLANES = 2 << 30                    # bytes of bf16 in one sample: 58k tokens of 8 taps + final state at 2048 wide
LIMITS = {"seq": 1 << 48, "tokens": 1 << 20, "taps": 256, "hidden": 1 << 16, "probes": 1 << 16, "escapes": MAX_PLANES // 2,
          "side_bytes": 1 << 32, "side_crc": (1 << 32) - 1, "body_bytes": 1 << 32}
AT_LEAST_1 = ("tokens", "taps", "hidden")
PIECE = 1 << 18                         # values coded at once: 1.5 MB of intermediates.  A quarter of it costs a third more time
BELOW = 10                              # of the 15 nibbles, how many lie below the channel's usual exponent
SAMPLE_ROWS = 3 ** 5                    # at most so many rows decide what is usual
HUFFMAN = dict(strategy=zstandard.STRATEGY_FAST, window_log=17, min_match=7, hash_log=6)
RAW_LEVEL = -131072                     # zstd's fastest: it finds nothing and stores raw blocks
ESCAPE = 15
FOUR, SEVEN = np.uint16(4), np.uint16(7)
REST, NIBBLE = np.uint16(0x807F), np.uint16(0x0780)         # sign and mantissa; the exponent's low four bits
SWAPPED = ">u2"                         # the bytes of a little-endian word, exchanged


@dataclass(frozen=True)
class Header:
    """What a receiver checks before it stores a sample.  Counts are values, *_bytes are bytes."""

    stream: str
    seq: int
    contract: str               # ExtractionContract.hash
    prompt: str
    tokens: int
    taps: int
    hidden: int
    probes: int
    escapes: int
    side_bytes: int
    side_crc: int
    body_bytes: int

    @property
    def planes_bytes(self) -> int:
        """bf16 bytes that decoding gives: taps and final states."""
        return 2 * (self.taps + 1) * self.tokens * self.hidden


@dataclass(frozen=True, eq=False)
class Sample:
    """A capture with its place in the stream."""

    stream: str
    seq: int
    contract: str               # ExtractionContract.hash
    capture: Capture


def encode(capture: Capture, *, stream: str, seq: int, contract: str) -> bytes:
    """One sample as bytes.  Raises CaptureError for a capture that the format does not hold (no token, no tap, too large)."""
    taps, tokens, hidden = capture.taps.shape
    planes = [np.ascontiguousarray(plane) for plane in (*capture.taps, capture.final)]
    header = dict(stream=stream, seq=seq, contract=contract, prompt=capture.prompt, tokens=tokens, taps=taps, hidden=hidden,
                  probes=len(capture.probe_rows), escapes=0, side_bytes=0, side_crc=0, body_bytes=0)
    try:
        _checked(header)
    except CorruptError as error:
        raise CaptureError(str(error)) from None
    scratch, packer = _Scratch(tokens, hidden), _Packer()
    bases, frames, positions, values = [], [], [], []
    for plane in planes:
        base = _base(plane)
        bases.append(base)
        tiled = _tiled(base, tokens)
        for piece in _cut(plane):
            pairs, rest, where, what = _split(piece, tiled[:len(piece)], scratch)
            frames += [packer.huffman.compress(pairs), packer.raw.compress(rest)]
            positions.append(where)
            values.append(what)
    arrays = [(capture.ids, "<i4"), (capture.loss_mask, "u1"), (capture.probe_rows, "<i4"), (capture.probe_tokens, "<i4"),
              (np.concatenate(bases), "u1"), ([len(frame) for frame in frames], "<u4"), ([len(w) for w in positions], "<u4"),
              (np.concatenate(positions), "<u4"), (np.concatenate(values), "u1")]
    side = packer.small.compress(b"".join(np.asarray(array).astype(dtype).tobytes() for array, dtype in arrays))
    header |= dict(escapes=sum(map(len, positions)), side_bytes=len(side), side_crc=zlib.crc32(side),
                   body_bytes=sum(map(len, frames)))
    packed = msgpack.packb(header)
    start = PREFIX.pack(MAGIC, VERSION, 0, len(packed), 0)[:-4]
    return b"".join([start, zlib.crc32(packed, zlib.crc32(start)).to_bytes(4, "little"), packed, side, *frames])


def decode(data: bytes | memoryview) -> Sample:
    """The sample, every checksum verified.  Raises CorruptError; allocates only what a checked header declares."""
    header, side, frames = _open(data)
    scratch = _Scratch(header.tokens, header.hidden)
    planes = np.empty((header.taps + 1, header.tokens, header.hidden), np.uint16)
    places = iter(_places(side))
    for plane, base in zip(planes, side["bases"].reshape(len(planes), header.hidden)):
        tiled = _tiled(base, header.tokens)
        for piece in _cut(plane):
            pairs, rest = next(frames)
            _merge(pairs, rest, *next(places), tiled[:len(piece)], scratch, out=piece)
    capture = Capture(ids=side["ids"].astype(np.int32), loss_mask=side["loss_mask"].astype(np.bool_), taps=planes[:-1],
                      final=planes[-1], probe_rows=side["probe_rows"].astype(np.int32),
                      probe_tokens=side["probe_tokens"].astype(np.int32), prompt=header.prompt)
    return Sample(header.stream, header.seq, header.contract, capture)


def verify(data: bytes | memoryview) -> Header:
    """Every checksum, length and range that decode checks, without building the planes.  Raises CorruptError."""
    header, _, frames = _open(data)
    for _ in frames:
        pass
    return header


def read_header(data: bytes | memoryview) -> Header:
    """Magic, version, bounds, lengths and the header's checksum; no plane is touched.  Raises CorruptError."""
    data = memoryview(data)
    if len(data) < PREFIX.size:
        raise CorruptError(f"sample: {len(data)} bytes are less than a prefix")
    magic, version, zero, length, crc = PREFIX.unpack_from(data)
    if magic != MAGIC or version != VERSION or zero:
        raise CorruptError(f"sample: begins with {bytes(data[:12])!r}, not with a sample of version {VERSION}")
    if length > MAX_HEADER or PREFIX.size + length > len(data):
        raise CorruptError(f"sample: a header of {length} bytes in {len(data)} bytes, at most {MAX_HEADER} allowed")
    packed = data[PREFIX.size:PREFIX.size + length]
    if zlib.crc32(packed, zlib.crc32(data[:PREFIX.size - 4])) != crc:
        raise CorruptError("sample: the header's checksum is wrong")
    try:
        values = msgpack.unpackb(packed, max_str_len=256, max_map_len=32, max_array_len=0, max_bin_len=0, max_ext_len=0)
    except Exception as error:                              # msgpack raises many kinds; each means the same here
        raise CorruptError(f"sample: header is not msgpack ({error})") from None
    header = _checked(values)
    want = PREFIX.size + length + header.side_bytes + header.body_bytes
    if want != len(data):
        raise CorruptError(f"sample: {len(data)} bytes, the header says {want}")
    return header


def _checked(values: object) -> Header:
    """Field by field: names, types, ranges; then the sizes against each other."""
    names = [field.name for field in fields(Header)]
    if not isinstance(values, dict) or set(values) != set(names):
        raise CorruptError(f"sample: header fields {values.keys() if isinstance(values, dict) else type(values)}")
    for name, value in values.items():
        if name in LIMITS:
            least = int(name in AT_LEAST_1)
            if type(value) is not int or not least <= value <= LIMITS[name]:
                raise CorruptError(f"sample: {name} is {value!r}, allowed are {least} to {LIMITS[name]}")
        elif type(value) is not str or len(value) > 128:
            raise CorruptError(f"sample: {name} is not text of at most 128 characters")
    header = Header(**values)
    if len(header.contract) != 64 or set(header.contract) - set("0123456789abcdef"):
        raise CorruptError("sample: contract is not a sha256 in hex")
    if header.planes_bytes > MAX_PLANES:
        raise CorruptError(f"sample: {header.planes_bytes} bytes of planes, at most {MAX_PLANES} allowed")
    if header.probes > header.tokens or 2 * header.escapes > header.planes_bytes:
        raise CorruptError(f"sample: {header.probes} probes, {header.escapes} escapes for {header.tokens} tokens")
    return header


class _Packer:
    """The three ways to compress.  Not shared between threads, so made per sample (microseconds)."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(**HUFFMAN, write_checksum=True)
        self.huffman = zstandard.ZstdCompressor(compression_params=parameters)
        self.raw = zstandard.ZstdCompressor(level=RAW_LEVEL, write_checksum=True)
        self.small = zstandard.ZstdCompressor(level=3, write_checksum=True)


class _Scratch:
    """Intermediates of one piece, reused for every piece of a sample."""

    def __init__(self, tokens: int, hidden: int) -> None:
        size = 2 * _half(min(tokens, _rows_per_piece(hidden)) * hidden)
        self.bytes, self.nibbles, self.fifteens = (np.full(size, ESCAPE, np.uint8) for _ in range(3))
        self.words, self.rest = (np.zeros(size, np.uint16) for _ in range(2))


def _rows_per_piece(hidden: int) -> int:
    return max(1, PIECE // hidden)


def _cut(plane: np.ndarray) -> Iterator[np.ndarray]:
    """Pieces of one plane (T, H): whole rows, flat, at most PIECE values."""
    rows = _rows_per_piece(plane.shape[1])
    for start in range(0, len(plane), rows):
        yield plane[start:start + rows].reshape(-1)


def _half(values: int) -> int:
    """Pairs for so many values: pair i is values i and half + i, zero behind the end.  A multiple of 8, for uint64 views."""
    return (values + 15) // 16 * 8


def _base(plane: np.ndarray) -> np.ndarray:
    """Exponent that counts as 0, per channel: (T, H) uint16 -> (H,) uint8, modulo 256.

    A median of some rows, less BELOW: the remedian (Rousseeuw and Bassett 1990, medians of three, of three, ...), which is
    whole-row minima and maxima and costs a quarter of np.partition down the columns.  The decoder need not know the rule.
    """
    count = SAMPLE_ROWS
    while count > len(plane):
        count //= 3
    rows = (plane[np.arange(count) * len(plane) // count] >> SEVEN).astype(np.uint8)
    while len(rows) > 1:
        a, b, c = rows[0::3], rows[1::3], rows[2::3]
        rows = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return rows[0] - np.uint8(BELOW)


def _tiled(base: np.ndarray, tokens: int) -> np.ndarray:
    """(H,) exponents -> one piece's worth of them, where bf16 has its exponent: uint16."""
    return np.tile(base.astype(np.uint16) << SEVEN, min(tokens, _rows_per_piece(len(base))))


def _split(piece: np.ndarray, base: np.ndarray, scratch: _Scratch) -> tuple[np.ndarray, ...]:
    """n values, n exponent bases -> pairs (half,) uint8, rest (half,) uint16, escapes: positions (E,) uint32, differences (E,) uint8.

    pairs and rest are views of scratch: compress them before the next call.
    """
    n, half = len(piece), _half(len(piece))
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


def _merge(pairs: bytes, rest: bytes, where: np.ndarray, what: np.ndarray, base: np.ndarray, scratch: _Scratch,
           *, out: np.ndarray) -> None:
    """The inverse of _split, into out (n,) uint16."""
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


def _open(data: bytes | memoryview) -> tuple[Header, dict[str, np.ndarray], Iterator[tuple[bytes, bytes]]]:
    """Header, side arrays, and the checked frames (pairs, rest) of each piece in order, decompressed one by one."""
    data = memoryview(data)
    header = read_header(data)
    start = len(data) - header.body_bytes
    side = _read_side(data[start - header.side_bytes:start], header)
    return header, side, _read_frames(data[start:], side, header)


def _piece_sizes(header: Header) -> list[int]:
    """Values in each piece of one plane."""
    rows = _rows_per_piece(header.hidden)
    return [min(rows, header.tokens - start) * header.hidden for start in range(0, header.tokens, rows)]


def _read_side(frame: memoryview, header: Header) -> dict[str, np.ndarray]:
    planes, pieces = header.taps + 1, (header.taps + 1) * len(_piece_sizes(header))
    layout = {"ids": ("<i4", header.tokens), "loss_mask": ("u1", header.tokens), "probe_rows": ("<i4", header.probes),
              "probe_tokens": ("<i4", header.probes), "bases": ("u1", planes * header.hidden), "sizes": ("<u4", 2 * pieces),
              "counts": ("<u4", pieces), "positions": ("<u4", header.escapes), "differences": ("u1", header.escapes)}
    if zlib.crc32(frame) != header.side_crc:
        raise CorruptError("sample: the side buffer's checksum is wrong")
    data = _unpack(frame, sum(np.dtype(dtype).itemsize * count for dtype, count in layout.values()))
    side, at = {}, 0
    for name, (dtype, count) in layout.items():
        side[name] = np.frombuffer(data, dtype, count, at)
        at += side[name].nbytes
    sizes = np.tile(_piece_sizes(header), planes)
    if int(side["sizes"].sum(dtype=np.uint64)) != header.body_bytes or int(side["counts"].sum(dtype=np.uint64)) != header.escapes:
        raise CorruptError("sample: frame sizes or escape counts do not add up")
    if header.escapes and (side["positions"] >= np.repeat(sizes, side["counts"])).any():
        raise CorruptError("sample: an escape lies outside its piece")
    if (side["loss_mask"] > 1).any() or ((side["probe_rows"] < 0) | (side["probe_rows"] >= header.tokens)).any():
        raise CorruptError("sample: loss mask or probe rows out of range")
    return side


def _places(side: dict[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Escapes of each piece: positions, differences."""
    ends = np.cumsum(side["counts"], dtype=np.int64).tolist()
    for start, end in zip([0, *ends], ends):
        yield side["positions"][start:end], side["differences"][start:end]


def _read_frames(body: memoryview, side: dict[str, np.ndarray], header: Header) -> Iterator[tuple[bytes, bytes]]:
    ends = np.cumsum(side["sizes"], dtype=np.int64).tolist()
    starts = iter(zip([0, *ends], ends))
    unpacker = zstandard.ZstdDecompressor()
    for values in _piece_sizes(header) * (header.taps + 1):
        (a, b), (c, d) = next(starts), next(starts)
        yield _unpack(body[a:b], _half(values), unpacker), _unpack(body[c:d], 2 * _half(values), unpacker)


def _unpack(frame: memoryview, size: int, unpacker: zstandard.ZstdDecompressor | None = None) -> bytes:
    """One zstd frame of exactly `size` bytes, checksum verified; its own header is compared, not trusted."""
    head = _frame_head(size)
    if frame[:len(head)] != head:
        raise CorruptError(f"sample: a frame does not begin as one of {size} bytes does")
    try:
        data = (unpacker or zstandard.ZstdDecompressor()).decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"sample: {error}") from None
    if len(data) != size:
        raise CorruptError(f"sample: a frame of {len(data)} bytes, expected {size}")
    return data


def _frame_head(size: int) -> bytes:
    """How a zstd frame of known size begins (RFC 8878, 3.1.1.1): one segment, no dictionary, with checksum."""
    for flag, width, least, limit in ((0x24, 1, 0, 256), (0x64, 2, 256, 65792), (0xA4, 4, 0, 1 << 32)):
        if size < limit:
            return b"\x28\xb5\x2f\xfd" + bytes([flag]) + (size - least).to_bytes(width, "little")
    raise CorruptError(f"sample: a frame of {size} bytes")
