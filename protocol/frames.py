"""Message <-> list of byte strings: one msgpack header, and at most one raw buffer.  A table says what each field may be.

Whatever arrives either becomes a message with checked fields or raises PeerError naming kind and field; nothing is
allocated on the word of a length in the bytes.  No pickle, no path, no state here.  README.md gives the reasons."""
from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import msgpack

from common import jsons
from common.errors import PeerError, one_line
from protocol.events import (VERSION, Ack, AssetData, AssetGet, Bye, CheckpointData, CheckpointGet, CheckpointOffer, Credit, Differs,
                             FileInfo, Heartbeat, Hello, LocalError, Message, Refuse, Report, SampleAgain, SampleData, SampleGet, StreamHeartbeat,
                             Welcome)

MAX_HEADER = 64 << 10        # bytes; a contract or an asset list is about 2 KiB
MAX_ITEMS = 1024             # entries of one msgpack array or map: what a header of nested empty arrays can make us allocate
MAX_SAMPLE = 1 << 30         # bytes; 32k tokens of 9 planes x 2048 compressed are 0.8 GiB
MAX_DOCUMENT = 1 << 20       # bytes of JSON in a report or a checkpoint's record
CHUNK = 1 << 20              # bytes of a file in one message
MAX_FILE = 64 << 30          # bytes; an embedding of 248320 x 2048 in fp32 is 2 GiB
MAX_SEQ = 1 << 48            # samples, and steps
MAX_CREDIT = 1 << 62         # bytes, a total over one connection
ASSET_NAMES = ("embedding", "lm_head", "tokenizer", "target_config")
CHECKPOINT_NAMES = ("config.json", "model.safetensors", "record.json", "shortlist.safetensors")

Check = Callable[[Any], Any]                 # wire value -> message value; ValueError says what is wrong with it


def integer(low: int, high: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"must be an integer from {low} to {high}")
        return value
    return check


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def text(longest: int, pattern: str = r"(?s).*") -> Check:
    def check(value: Any) -> str:
        if type(value) is not str or len(value) > longest or not re.fullmatch(pattern, value):
            raise ValueError(f"must be text of at most {longest} characters" + (f" like {pattern}" if pattern != r"(?s).*" else ""))
        return value
    return check


def words(longest: int) -> Check:
    """Text for people: it ends in a log or on a screen, so it becomes one line of printable characters."""
    check = text(longest)
    return lambda value: one_line(check(value))


def optional(inner: Check) -> Check:
    return lambda value: None if value is None else inner(value)


def many(inner: Check, most: int) -> Check:
    def check(value: Any) -> tuple:
        if type(value) is not list or len(value) > most:
            raise ValueError(f"must be a list of at most {most}")
        return tuple(inner(item) for item in value)
    return check


def files(names: tuple[str, ...]) -> Check:
    """Files with names of a fixed set, each once."""
    checks = {"name": text(64), "size": integer(0, MAX_FILE), "sha256": HEX64}
    def check(value: Any) -> tuple[FileInfo, ...]:
        found = many(lambda item: FileInfo(**_fields(item, checks)), len(names))(value)
        got = [f.name for f in found]
        if set(got) - set(names) or len(set(got)) != len(got):
            raise ValueError(f"names must be of {', '.join(names)}, each once")
        return found
    return check


def flat(value: Any) -> dict:
    """A small dict of plain values, for people to read."""
    if type(value) is not dict or len(value) > 64:
        raise ValueError("must be a map of at most 64 entries")
    for name, item in value.items():
        if type(name) is not str or type(item) not in (str, int, float, bool, type(None)):
            raise ValueError("must map texts to plain values")
    return value


def plain(value: Any) -> dict:
    """A map that JSON can say; its reader checks the shape (the contract: ExtractionContract.from_dict)."""
    try:
        json.dumps(value, sort_keys=True)                    # refuses bytes and msgpack's own types at any depth
        jsons.shallow(value)
    except (TypeError, ValueError, RecursionError):
        value = None
    if type(value) is not dict:
        raise ValueError("must be a map of texts, numbers and lists")
    return value


def as_it_came(value: bytes | memoryview) -> bytes | memoryview:
    """A sample, whose bytes the codec checks; not copied."""
    return value


def document(value: bytes | memoryview) -> dict:
    """JSON in a buffer: a report is larger than a header may be."""
    try:
        found = jsons.loads(bytes(value))
    except ValueError:
        raise ValueError("must be JSON") from None
    if type(found) is not dict:
        raise ValueError("must be a JSON object")
    return found


HEX64 = text(64, "[0-9a-f]{64}")
SEQ = integer(0, MAX_SEQ)
NAME = text(64, r"[A-Za-z0-9][A-Za-z0-9._:-]*")
OFFER = text(32, "[0-9a-f]{32}")
STREAM = text(64, r"[A-Za-z0-9._:-]+")
REASON = words(4096)
OFFSET, LENGTH = integer(0, MAX_FILE), integer(1, CHUNK)

FIELDS: dict[type, dict[str, Check]] = {
    Hello: {"name": NAME, "stream": optional(STREAM), "next_seq": SEQ, "contract": optional(plain), "samples": boolean,
            "newest": optional(HEX64)},
    Credit: {"total": integer(0, MAX_CREDIT)},
    Ack: {"seq": integer(-1, MAX_SEQ)},
    SampleGet: {"seq": SEQ},
    AssetGet: {"sha256": HEX64, "offset": OFFSET, "length": LENGTH},
    CheckpointOffer: {"offer": OFFER, "run": NAME, "step": SEQ, "contract_hash": HEX64, "files": files(CHECKPOINT_NAMES)},
    CheckpointData: {"offer": OFFER, "name": text(64), "offset": OFFSET},
    Welcome: {"contract": plain, "stream": STREAM, "first_seq": SEQ, "next_seq": SEQ, "assets": files(ASSET_NAMES), "evaluation": flat},
    Refuse: {"reason": REASON, "fields": many(words(512), 64)},
    SampleData: {"seq": SEQ},
    SampleAgain: {"seq": SEQ},
    AssetData: {"sha256": HEX64, "offset": OFFSET},
    CheckpointGet: {"offer": OFFER, "name": text(64), "offset": OFFSET, "length": LENGTH},
    Report: {"offer": OFFER, "error": optional(REASON)},
    StreamHeartbeat: {"next_seq": SEQ, "ended": boolean, "status": flat},
    Heartbeat: {"status": flat},
    Bye: {"reason": REASON},
}
# Kinds that carry a buffer: its field, its most bytes, how it is read.
BUFFERS: dict[type, tuple[str, int, Check]] = {
    CheckpointOffer: ("record", MAX_DOCUMENT, document),
    CheckpointData: ("data", CHUNK, bytes),
    SampleData: ("data", MAX_SAMPLE, as_it_came),
    SampleAgain: ("data", MAX_SAMPLE, as_it_came),
    AssetData: ("data", CHUNK, bytes),
    Report: ("result", MAX_DOCUMENT, document),
}
KINDS = {kind.__name__: kind for kind in FIELDS}
MAX_FROM_TRAINER = max(MAX_HEADER, MAX_DOCUMENT, CHUNK)                # bytes of one frame, for ZMQ_MAXMSGSIZE
MAX_FROM_PRODUCER = max(MAX_FROM_TRAINER, MAX_SAMPLE)


def encode(message: Message) -> list[bytes]:
    """Frames to send: [header] or [header, buffer].  LocalError where decode would refuse them at the other end."""
    kind = type(message)
    values = {name: _wire(getattr(message, name)) for name in FIELDS[kind]}
    parts = [msgpack.packb([VERSION, kind.__name__, values])]
    if kind in BUFFERS:
        name, _, read = BUFFERS[kind]
        value = getattr(message, name)
        parts.append(json.dumps(value).encode() if read is document else value)
    try:
        decode(parts)
    except PeerError as error:
        raise LocalError(f"not to be sent: {error}") from None
    return parts


def decode(parts: list[bytes | memoryview]) -> Message:
    """Frames as they came -> message.  Differs for another protocol version, else PeerError naming kind and field."""
    if not parts or len(parts) > 2:
        raise PeerError(f"{len(parts)} frames; a message has a header and at most one buffer")
    if len(parts[0]) > MAX_HEADER:
        raise PeerError(f"header of {len(parts[0])} bytes; at most {MAX_HEADER}")
    try:
        header = msgpack.unpackb(parts[0], max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise PeerError(f"header is not msgpack: {_short(error)}") from None
    if type(header) is not list or not header or type(header[0]) is not int:
        raise PeerError("header does not begin with a protocol version")
    if header[0] != VERSION:
        raise Differs("protocol", (f"version: {VERSION} -> {header[0]}",))
    if len(header) != 3 or type(header[1]) is not str or header[1] not in KINDS:
        raise PeerError(f"unknown kind of message {_short(header[1:2])}")
    kind = KINDS[header[1]]
    try:
        values = _fields(header[2], FIELDS[kind])
        if (kind in BUFFERS) != (len(parts) == 2):
            raise ValueError(f"{len(parts) - 1} buffers, expected {int(kind in BUFFERS)}")
        if kind in BUFFERS:
            name, most, read = BUFFERS[kind]
            if len(parts[1]) > most:
                raise ValueError(f"{name} of {len(parts[1])} bytes; at most {most}")
            values[name] = _named(name, read, parts[1])
    except ValueError as error:
        raise PeerError(f"{kind.__name__}: {error}") from None
    return kind(**values)


def _fields(found: Any, checks: dict[str, Check]) -> dict:
    if type(found) is not dict or set(found) != set(checks):
        got = set(map(str, found)) if type(found) is dict else set()
        raise ValueError(f"fields missing {sorted(set(checks) - got)}, unknown {_short(sorted(got - set(checks)))}")
    return {name: _named(name, check, found[name]) for name, check in checks.items()}


def _named(name: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _wire(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_wire(item) for item in value]
    return dataclasses.asdict(value) if isinstance(value, FileInfo) else value


def _short(value: object) -> str:
    shown = str(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
