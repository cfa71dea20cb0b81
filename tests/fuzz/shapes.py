"""Inputs of several parts, and changes that keep what a reader checks first in order.

A checksum, a length or an id made of the content stops a blind change at the door; so each kind of input is taken apart, changed
inside, and put together again with those made right.  Not always: one change in four is blind, for the door itself is a reader.
Pure: a Random decides, so that hypothesis and atheris can drive the same changes."""
from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable

import msgpack
import numpy as np
import zstandard

from protocol import codec
from protocol.transfer import offer_id

Change = Callable[[bytes, random.Random], bytes]
MOST_PARTS = 64
MANY = 100                               # entries more in a list or map, or times as many of them in a text
WORDS = (0, 1, -1, 2, 7, 8, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, -2**63, 2**64 - 1)
VALUES = (*WORDS, None, True, False, 0.0, -0.5, 1e308, float("inf"), float("-inf"), float("nan"), "", "x", "../../x", "/etc/passwd", "a\0b",
          "\n", "0" * 64, "f" * 32, "\u00e9" * 40, "x" * 600, [], {}, [[]], {"": []}, ["x"] * 70, {"a": 1})
DEEP, HUGE = "@deep", "@huge"            # JSON that Python cannot write: brackets without end, a number of 400 digits


def join(parts: list[bytes]) -> bytes:
    """Parts -> one input: three bytes of length before each."""
    return b"".join(len(part).to_bytes(3, "little") + part for part in parts)


def split(data: bytes) -> list[bytes]:
    """The parts; any bytes are some parts: what is too short is cut, what is too many left out."""
    parts, at = [], 0
    while at < len(data) and len(parts) < MOST_PARTS:
        length = int.from_bytes(data[at:at + 3], "little")
        parts.append(data[at + 3:at + 3 + length])
        at += 3 + length
    return parts


def blind(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, put in, taken out or doubled, or a number of 1 to 8 bytes put over them."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 30))
        match rng.randrange(5):
            case 0: out[at:at + 1] = bytes([rng.randrange(256)])
            case 1: out[at:at] = rng.randbytes(length)
            case 2: del out[at:at + length]
            case 3: out[at:at] = out[at:at + length]
            case 4:
                size = rng.choice((1, 2, 4, 8))
                out[at:at + size] = (rng.choice(WORDS) % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(out)


def tree(value: object, rng: random.Random, more: tuple = ()) -> object:
    """Nested lists and maps with one place changed; `more` are values to put there beside VALUES."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        match rng.randrange(9):
            case 0: return {k: v for k, v in value.items() if k != key}
            case 2: return value | {f"{key}{i}": value[key] for i in range(MANY)}
            case 1: return value | {rng.choice(("x", "", "__metadata__", key + "x" if isinstance(key, str) else "y")): rng.choice((*VALUES, *more))}
            case _: return value | {key: tree(value[key], rng, more)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        match rng.randrange(9):
            case 0: return value[:at] + value[at + 1:]
            case 1: return value[:at] + [value[at]] + value[at:]
            case 2: return value + [value[at]] * MANY
            case _: return value[:at] + [tree(value[at], rng, more)] + value[at + 1:]
    if type(value) is int and rng.random() < 0.4:
        return value + rng.choice((-1, 1, 2, 1000))
    if isinstance(value, str) and value and rng.random() < 0.4:
        if rng.random() < 0.2:
            return value + value[-1] * rng.choice((10 * MANY, 50 * MANY))
        return blind(value.encode(), rng).decode("latin-1")
    return rng.choice((*VALUES, *more))


def json_text(data: bytes, rng: random.Random) -> bytes:
    """A JSON document with one place changed."""
    try:
        changed = json.dumps(tree(json.loads(data), rng, (DEEP, HUGE)))
    except (ValueError, RecursionError):
        return blind(data, rng)
    depth = rng.choice((40, 400, 3000))
    return changed.replace(f'"{DEEP}"', "[" * depth + "]" * depth).replace(f'"{HUGE}"', "9" * 400).encode()


def header(data: bytes, rng: random.Random) -> bytes:
    """A message's msgpack header with one place changed."""
    try:
        return msgpack.packb(tree(msgpack.unpackb(data), rng, (b"", b"\xff", msgpack.Timestamp(0, 0))))
    except (ValueError, OverflowError, TypeError, msgpack.UnpackException):
        return blind(data, rng)


def safetensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header, its length right."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8 or rng.random() < 0.1:
        return blind(data, rng)
    changed = json_text(data[8:8 + length], rng)
    return len(changed).to_bytes(8, "little") + changed + (data[8 + length:] if rng.random() < 0.9 else blind(data[8 + length:], rng))


def sample(data: bytes, rng: random.Random) -> bytes:
    """One of the codec's samples with another header, other side arrays or other frames; every length, checksum and seal is right."""
    try:
        found = codec.read_header(data)
        fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
        start = len(data) - found.body_bytes
        side = zstandard.ZstdDecompressor().decompress(data[start - found.side_bytes:start])
    except Exception:                                   # not whole any more: nothing to keep right
        return blind(data, rng)
    body, kind = data[start:], rng.randrange(4)
    if kind == 0:
        fields = tree(fields, rng)
    elif kind == 1:
        side = blind(side, rng)
    elif kind == 2:
        side, body = _reframed(side, body, found, rng)
    else:                                               # sizes that grow together
        grown = rng.choice(("tokens", "taps", "hidden", "escapes", "probes"))
        fields[grown] = max(1, fields[grown] + rng.choice((-1, 1, 255, 65535, 2**20)))
        side = side.ljust(min(_side_size(fields), 1 << 26), b"\0")[:max(1, _side_size(fields))]
    packed_side = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(side)
    if isinstance(fields, dict):
        fields |= {"side_bytes": len(packed_side), "side_crc": zlib.crc32(packed_side)} | ({} if kind == 0 else {"body_bytes": len(body)})
    try:
        packed = msgpack.packb(fields)
    except (ValueError, OverflowError, TypeError):
        return blind(data, rng)
    start = struct.pack("<8sHHI", codec.MAGIC, codec.VERSION, 0, len(packed))
    return start + struct.pack("<I", zlib.crc32(start + packed)) + packed + packed_side + body


def _side_size(fields: dict) -> int:
    rows = max(1, codec.planes.PIECE // max(1, fields["hidden"]))
    pieces = -(-fields["tokens"] // rows) * (fields["taps"] + 1)
    return 5 * fields["tokens"] + 8 * fields["probes"] + (fields["taps"] + 1) * fields["hidden"] + 20 * pieces + 5 * fields["escapes"]


def _reframed(side: bytes, body: bytes, found: codec.Header, rng: random.Random) -> tuple[bytes, bytes]:
    """One frame of the body changed, its length and seal made right."""
    frames = 2 * (found.taps + 1) * -(-found.tokens // codec.planes.rows_per_piece(found.hidden))
    at = 5 * found.tokens + 8 * found.probes + (found.taps + 1) * found.hidden
    if at + 8 * frames > len(side):
        return blind(side, rng), body
    lengths = np.frombuffer(side, "<u4", frames, at).copy()
    which = rng.randrange(frames)
    begin = int(lengths[:which].sum())
    old = body[begin:begin + int(lengths[which])]
    new = blind(old, rng)
    if rng.random() < 0.3:
        new = zstandard.ZstdCompressor(level=rng.choice((-5, 1)), write_checksum=True).compress(rng.randbytes(rng.choice((0, 8, 960))))
    lengths[which] = len(new)
    out = bytearray(side)
    out[at:at + 4 * frames] = lengths.tobytes()
    size = codec.planes.half_of(min(found.tokens, codec.planes.rows_per_piece(found.hidden)) * found.hidden) * (1 + which % 2)
    out[at + 4 * (frames + which):at + 4 * (frames + which) + 4] = struct.pack("<I", codec._seal(new, size))
    return bytes(out), body[:begin] + new + body[begin + len(old):]


def parts(*changes: Change) -> Change:
    """Of an input of several parts, one changed, each by its own rule (the last rule is for all that follow)."""
    def change(data: bytes, rng: random.Random) -> bytes:
        found = split(data)
        if not found:
            return blind(data, rng)
        at = rng.randrange(len(found))
        found[at] = changes[min(at, len(changes) - 1)](found[at], rng)
        return join(found)
    return change


def talk(data: bytes, rng: random.Random) -> bytes:
    """A conversation (talks.py) with a message changed, lost, doubled, put elsewhere; offers carry the id of what they list."""
    found = split(data)
    if not found:
        return blind(data, rng)
    at, to = rng.randrange(len(found)), rng.randrange(len(found) + 1)
    match rng.randrange(10):
        case 0: del found[at]
        case 1: found.insert(to, found[at])
        case 2: found.insert(to, found.pop(at)) if to < len(found) else found.append(found.pop(at))
        case 3: found = found[:at] + found[at:to] * 2 + found[max(at, to):]
        case 4: found.insert(to, bytes([rng.randrange(256)]) + rng.randbytes(rng.randrange(3)))
        case 5: found[at] = blind(found[at], rng)
        case 6: found += [again for i in range(40) for again in _with_ids([_renamed(found[at], i)])]
        case _: found[at] = _message(found[at], rng)
    return join(_with_ids(found[:MOST_PARTS]))


def _message(part: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(part[1:3], "little")
    first, buffer = part[3:3 + length], part[3 + length:]
    if rng.random() < 0.8 or not buffer:
        first = header(first, rng)
    elif buffer.startswith(codec.MAGIC):
        buffer = sample(buffer, rng)
    else:
        buffer = json_text(buffer, rng) if buffer[:1] == b"{" else blind(buffer, rng)
    return part[:1] + min(len(first), 65535).to_bytes(2, "little") + first + buffer


def _renamed(part: bytes, number: int) -> bytes:
    """The same message about another run, another name."""
    length = int.from_bytes(part[1:3], "little")
    try:
        version, kind, fields = msgpack.unpackb(part[3:3 + length])
        first = msgpack.packb([version, kind, fields | {name: f"{fields[name]}{number}" for name in ("run", "name") if name in fields}])
    except Exception:                                   # no message
        return part
    return part[:1] + len(first).to_bytes(2, "little") + first + part[3 + length:]


def _with_ids(found: list[bytes]) -> list[bytes]:
    """Each CheckpointOffer's id made again from what it lists, and put in place of the old one wherever that is said."""
    for part in list(found):
        length = int.from_bytes(part[1:3], "little")
        try:
            _, kind, fields = msgpack.unpackb(part[3:3 + length])
            if kind != "CheckpointOffer":
                continue
            old = fields["offer"].encode()
            right = offer_id(fields["run"], fields["step"], tuple(_Named(f["name"], f["sha256"]) for f in fields["files"])).encode()
        except Exception:                               # no such message: nothing to make right
            continue
        if len(old) == len(right):
            found = [other.replace(old, right) for other in found]
    return found


class _Named:
    """What offer_id looks at."""

    def __init__(self, name: object, sha256: object) -> None:
        self.name, self.sha256 = name, sha256
