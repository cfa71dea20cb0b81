"""Capture <-> bytes: one self-describing byte string is one sample, one file and one payload on the wire.

    prefix   24 bytes, little-endian: magic "hsdraft\\0", version u16, zero u16, header length u32, crc32 u32 of all of it and
             the header: a flip in any length is found before the length is used
    header   msgpack map, the fields of Header: bounded, every one checked for type and range, then against the others and the
             real length, before anything is allocated
    side     one zstd frame, its crc32 in the header: ids i32[T], loss_mask u8[T], probe_rows i32[P], probe_tokens i32[P],
             bases u8[K+1, H], frame lengths u32[2 a piece], frame seals u32[2 a piece], escapes u32[a piece], escape
             positions u32[E], escape differences u8[E]
    body     for each plane (K taps, then the final state), for each piece: pairs, rest (protocol/planes.py), a zstd frame each.
             pairs is Huffman-coded; rest does not shrink and is kept in raw blocks, for the frame's checksum

Every byte is under a checksum.  A frame's seal is the crc32 of all its bytes, for zstd's tables have idle bits that a checksum
of the content does not see.  But a frame of raw blocks, three quarters of all bytes, has no tables: its seal is the crc32 of its
head, the rest is under zstd's own xxh64, at a third of crc32's cost.
Left out: lossy modes, and more than one thread (callers encode samples side by side; numpy and zstd free the GIL).
"""
from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import BinaryIO

import msgpack
import numpy as np
import zstandard

from common.capture import Capture
from common.errors import CaptureError, CorruptError
from protocol import planes

MAGIC = b"hsdraft\0"
VERSION = 1
PREFIX = struct.Struct("<8sHHII")
MAX_HEADER = 1024                       # bytes; a header has about 250
MAX_DECODED = 2 << 30                   # bytes that one sample may decode to: 58k tokens of 8 taps + final state at 2048 wide
LIMITS = {"seq": 1 << 48, "tokens": 1 << 20, "taps": 256, "hidden": 1 << 16, "probes": 1 << 16, "escapes": MAX_DECODED,
          "side_bytes": MAX_DECODED, "side_crc": (1 << 32) - 1, "body_bytes": 2 * MAX_DECODED}
AT_LEAST_1 = ("tokens", "taps", "hidden")
RAW_LONGER = 12                         # bytes: a raw frame with its checksum is more than that longer than its content; no other is
RAW_HEAD = 12                           # bytes of a raw frame at most before its content: frame header 6 to 9, block header 3
HUFFMAN = dict(strategy=zstandard.STRATEGY_FAST, window_log=17, min_match=7, hash_log=6)
RAW_LEVEL = -131072                     # zstd's fastest: it finds nothing and stores raw blocks


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
    def state_bytes(self) -> int:
        """bf16 bytes of taps and final states, decoded."""
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
    header = dict(stream=stream, seq=seq, contract=contract, prompt=capture.prompt, tokens=tokens, taps=taps, hidden=hidden,
                  probes=len(capture.probe_rows), escapes=0, side_bytes=0, side_crc=0, body_bytes=0)
    try:
        _checked(header)
    except CorruptError as error:
        raise CaptureError(str(error)) from None
    bases, frames, seals, positions, values = [], [], [], [], []
    for plane in (*capture.taps, capture.final):
        base = planes.channel_base(plane)
        bases.append(base)
        tiled = planes.tiled(base, tokens)
        for piece in planes.cut(plane):
            pairs, rest, where, what = planes.split(piece, tiled[:len(piece)])
            packed = [_zstd.huffman.compress(pairs), _zstd.raw.compress(rest)]
            frames += packed
            seals += [_seal(frame, content.nbytes) for frame, content in zip(packed, (pairs, rest))]
            positions.append(where)
            values.append(what)
    arrays = [(capture.ids, "<i4"), (capture.loss_mask, "u1"), (capture.probe_rows, "<i4"), (capture.probe_tokens, "<i4"),
              (np.concatenate(bases), "u1"), ([len(frame) for frame in frames], "<u4"), (seals, "<u4"),
              ([len(where) for where in positions], "<u4"), (np.concatenate(positions), "<u4"), (np.concatenate(values), "u1")]
    side = _zstd.small.compress(b"".join(np.asarray(array).astype(dtype).tobytes() for array, dtype in arrays))
    header |= dict(escapes=sum(map(len, positions)), side_bytes=len(side), side_crc=zlib.crc32(side),
                   body_bytes=sum(map(len, frames)))
    packed = msgpack.packb(header)
    start = PREFIX.pack(MAGIC, VERSION, 0, len(packed), 0)[:-4]
    return b"".join([start, zlib.crc32(packed, zlib.crc32(start)).to_bytes(4, "little"), packed, side, *frames])


def decode(data: bytes | memoryview) -> Sample:
    """The sample, every checksum verified.  Raises CorruptError; allocates only what a checked header declares."""
    header, side, frames = _open(data)
    states = np.empty((header.taps + 1, header.tokens, header.hidden), np.uint16)
    places = _places(side)
    for plane, base in zip(states, side["bases"].reshape(len(states), header.hidden)):
        tiled = planes.tiled(base, header.tokens)
        for piece in planes.cut(plane):
            pairs, rest = next(frames)
            planes.merge(pairs, rest, *next(places), tiled[:len(piece)], out=piece)
    capture = Capture(ids=side["ids"].astype(np.int32), loss_mask=side["loss_mask"].astype(np.bool_), taps=states[:-1],
                      final=states[-1], probe_rows=side["probe_rows"].astype(np.int32),
                      probe_tokens=side["probe_tokens"].astype(np.int32), prompt=header.prompt)
    return Sample(header.stream, header.seq, header.contract, capture)


def verify(data: bytes | memoryview) -> Header:
    """Every checksum, length and range that decode checks, without building the planes.  Raises CorruptError."""
    header, _, frames = _open(data)
    for _ in frames:
        pass
    return header


def read_text(file: BinaryIO, size: int) -> tuple[np.ndarray, np.ndarray]:
    """ids (T,) int32 and loss_mask (T,) bool of a sample of `size` bytes; of the file only its beginning is read, so the states
    are neither read nor verified.  Raises CorruptError."""
    header = read_header(file.read(PREFIX.size + MAX_HEADER), size)
    file.seek(size - header.body_bytes - header.side_bytes)
    side = _read_side(memoryview(file.read(header.side_bytes)), header)
    return side["ids"].astype(np.int32), side["loss_mask"].astype(np.bool_)


def read_header(data: bytes | memoryview, size: int | None = None) -> Header:
    """Magic, version, bounds, lengths and the header's checksum; no plane is touched.  Raises CorruptError.

    size: of the whole sample in bytes, where data is only its beginning (a prefix and MAX_HEADER)."""
    data = memoryview(data).cast("B")
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
    if want != (size := len(data) if size is None else size):
        raise CorruptError(f"sample: {size} bytes, the header says {want}")
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
        elif type(value) is not str or len(value) > 128 or not value.isascii():
            raise CorruptError(f"sample: {name} is not ASCII text of at most 128 characters")
    header = Header(**values)
    if len(header.contract) != 64 or set(header.contract) - set("0123456789abcdef"):
        raise CorruptError("sample: contract is not a sha256 in hex")
    if header.state_bytes + 5 * header.escapes > MAX_DECODED:
        raise CorruptError(f"sample: {header.state_bytes} bytes of states, {header.escapes} escapes; {MAX_DECODED} bytes allowed")
    if header.probes > header.tokens or 2 * header.escapes > header.state_bytes:
        raise CorruptError(f"sample: {header.probes} probes, {header.escapes} escapes for {header.tokens} tokens")
    return header


class _Zstd(threading.local):
    """The ways to compress, and the one back.  zstd's contexts are not shared between threads, and dear to make."""

    def __init__(self) -> None:
        self.huffman = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(**HUFFMAN))
        self.raw = zstandard.ZstdCompressor(level=RAW_LEVEL, write_checksum=True)
        self.small = zstandard.ZstdCompressor(level=3, write_checksum=True)
        self.back = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def _open(data: bytes | memoryview) -> tuple[Header, dict[str, np.ndarray], Iterator[tuple[bytes, ...]]]:
    """Header, side arrays, and the checked frames (pairs, rest) of each piece in order, decompressed one by one."""
    data = memoryview(data).cast("B")
    header = read_header(data)
    start = len(data) - header.body_bytes
    side = _read_side(data[start - header.side_bytes:start], header)
    return header, side, _read_frames(data[start:], side, header)


def _piece_sizes(header: Header) -> list[int]:
    """Values in each piece of one plane."""
    rows = planes.rows_per_piece(header.hidden)
    return [min(rows, header.tokens - start) * header.hidden for start in range(0, header.tokens, rows)]


def _read_side(frame: memoryview, header: Header) -> dict[str, np.ndarray]:
    """The side buffer's arrays by name, checked against each other and the header."""
    sizes = _piece_sizes(header) * (header.taps + 1)
    layout = {"ids": ("<i4", header.tokens), "loss_mask": ("u1", header.tokens), "probe_rows": ("<i4", header.probes),
              "probe_tokens": ("<i4", header.probes), "bases": ("u1", (header.taps + 1) * header.hidden),
              "lengths": ("<u4", 2 * len(sizes)), "seals": ("<u4", 2 * len(sizes)), "counts": ("<u4", len(sizes)),
              "positions": ("<u4", header.escapes), "differences": ("u1", header.escapes)}
    if zlib.crc32(frame) != header.side_crc:
        raise CorruptError("sample: the side buffer's checksum is wrong")
    data = _unpack(frame, sum(np.dtype(dtype).itemsize * count for dtype, count in layout.values()))
    side, at = {}, 0
    for name, (dtype, count) in layout.items():
        side[name] = np.frombuffer(data, dtype, count, at)
        at += side[name].nbytes
    if side["lengths"].sum(dtype=np.uint64) != header.body_bytes or side["counts"].sum(dtype=np.uint64) != header.escapes:
        raise CorruptError("sample: frame lengths or escape counts do not add up")
    if any(len(where) and where.max() >= size for (where, _), size in zip(_places(side), sizes)):
        raise CorruptError("sample: an escape lies outside its piece")
    if (side["loss_mask"] > 1).any() or ((side["probe_rows"] < 0) | (side["probe_rows"] >= header.tokens)).any():
        raise CorruptError("sample: loss mask or probe rows out of range")
    return side


def _places(side: dict[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Escapes of each piece: positions, differences."""
    ends = np.cumsum(side["counts"], dtype=np.int64).tolist()
    for start, end in zip([0, *ends], ends):
        yield side["positions"][start:end], side["differences"][start:end]


def _read_frames(body: memoryview, side: dict[str, np.ndarray], header: Header) -> Iterator[tuple[bytes, ...]]:
    ends = np.cumsum(side["lengths"], dtype=np.int64).tolist()
    sealed = zip([0, *ends], ends, side["seals"].tolist())

    def unseal(size: int) -> bytes:
        start, end, seal = next(sealed)
        if _seal(body[start:end], size) != seal:
            raise CorruptError("sample: a frame's seal is wrong")
        return _unpack(body[start:end], size)

    for values in _piece_sizes(header) * (header.taps + 1):
        half = planes.half_of(values)
        yield unseal(half), unseal(2 * half)


def _seal(frame: bytes | memoryview, size: int) -> int:
    """crc32 of a frame that holds `size` bytes, or of a raw frame's head."""
    return zlib.crc32(frame if len(frame) <= size + RAW_LONGER else frame[:RAW_HEAD])


def _unpack(frame: memoryview, size: int) -> bytes:
    """One zstd frame of exactly `size` bytes."""
    try:
        if zstandard.frame_content_size(frame) != size:             # before zstd allocates what the frame claims
            raise CorruptError(f"sample: a frame of another size than {size} bytes")
        return _zstd.back.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"sample: {error}") from None
