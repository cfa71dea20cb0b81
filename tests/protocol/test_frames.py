"""Every message survives the wire; nothing else does, and it fails as PeerError naming the field, never otherwise."""
import dataclasses
import json

import msgpack
import pytest
from hypothesis import given, settings, strategies as st

from common.errors import PeerError
from protocol import events as e
from protocol.frames import (ASSET_NAMES, BUFFERS, CHUNK, FIELDS, MAX_DOCUMENT, MAX_FROM_PRODUCER, MAX_FROM_TRAINER, MAX_HEADER, decode,
                             encode)
from ends import CONTRACT

SHA = "ab" * 32
FILES = (e.FileInfo("config.json", 7, SHA), e.FileInfo("model.safetensors", 0, SHA))
EXAMPLES = [
    e.Hello("box-1", None, 0, None, True), e.Hello("box:arm", "s1", 7, CONTRACT.to_dict(), False, SHA), e.Credit(1 << 40), e.Ack(-1),
    e.SampleGet(3), e.SampleAgain(3, b""), e.SampleAgain(4, b"x"),
    e.AssetGet(SHA, 3, 5), e.CheckpointOffer("0f" * 16, "run", 10, SHA, FILES, {"arm": "ce", "loss": [1.5, None]}),
    e.CheckpointData("0f" * 16, "config.json", 0, b"abc"),
    e.Welcome(CONTRACT.to_dict(), "s1", 0, 9, (e.FileInfo("lm_head", 1, SHA),), {"prompts": "abc", "n": 3}),
    e.Refuse("no", ("taps: 1 -> 2",)), e.SampleData(3, b"\0" * 10), e.AssetData(SHA, 0, b"x"), e.CheckpointGet("0f" * 16, "config.json", 0, 9),
    e.Report("0f" * 16, {"tau": 2.5}, None), e.Report("0f" * 16, {}, "failed"), e.StreamHeartbeat(9, True, {"a": 1}), e.Heartbeat({}), e.Bye("enough"),
]


def header(kind, **fields):
    return msgpack.packb([e.VERSION, kind, fields])


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message):
    assert decode(encode(message)) == message


def test_every_kind_has_an_example_and_every_field_a_check():
    assert {type(m) for m in EXAMPLES} == set(FIELDS) == set(e.Message.__args__)
    for kind, checks in FIELDS.items():
        buffer = {BUFFERS[kind][0]} if kind in BUFFERS else set()
        assert {f.name for f in dataclasses.fields(kind)} == set(checks) | buffer
    assert all(most <= MAX_FROM_PRODUCER for _, most, _ in BUFFERS.values())
    assert max(BUFFERS[kind][1] for kind in (e.CheckpointOffer, e.CheckpointData)) <= MAX_FROM_TRAINER < MAX_FROM_PRODUCER


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_each_field_missing_extra_or_ill_typed_is_named(message):
    first, *rest = encode(message)
    version, kind, fields = msgpack.unpackb(first)
    for name in fields:
        with pytest.raises(PeerError, match=rf"{kind}: .*{name}"):
            decode([msgpack.packb([version, kind, {k: v for k, v in fields.items() if k != name}]), *rest])
        with pytest.raises(PeerError, match=rf"{kind}: {name}"):
            decode([msgpack.packb([version, kind, fields | {name: [b"?"]}]), *rest])
    with pytest.raises(PeerError, match="surprise"):
        decode([msgpack.packb([version, kind, fields | {"surprise": 1}]), *rest])
    with pytest.raises(PeerError, match="buffer|frames"):
        decode([first, *rest, b"one more"])
    if rest:
        with pytest.raises(PeerError, match="buffer"):
            decode([first])


@pytest.mark.parametrize("parts, what", [
    ([], "0 frames"), ([b"", b"", b""], "3 frames"), ([b""], "not msgpack"), ([b"\xc1"], "not msgpack"), ([b"\x91" * 3000], "not msgpack"),
    ([b"\xdd\xff\xff\xff\xff"], "not msgpack"), ([b"\xdf\xff\xff\xff\xff"], "not msgpack"), ([msgpack.packb({"a": 1})], "version"),
    ([msgpack.packb([True, "Ack", {"seq": 1}])], "version"), ([msgpack.packb([e.VERSION])], "unknown kind"),
    ([header("Sesame", seq=1)], "Sesame"), ([header("FileInfo")], "FileInfo"), ([header("Ack", seq=True)], "Ack: seq"),
    ([header("Ack", seq=1.0)], "Ack: seq"), ([header("Ack", seq=-2)], "Ack: seq"), ([header("Credit", total=1 << 63)], "Credit: total"),
    ([header("Bye", reason="x" * 5000)], "Bye: reason"), ([b"\x00" * (MAX_HEADER + 1)], "header of"),
    ([header("Hello", name="../etc", stream=None, next_seq=0, contract=None, samples=True, newest=None)], "Hello: name"),
    ([header("Hello", name="a", stream=None, next_seq=0, contract={"taps": {b"a": 1}}, samples=True, newest=None)], "Hello: contract"),
    ([header("Hello", name="a", stream=None, next_seq=0, contract={"taps": msgpack.ExtType(1, b"")}, samples=True, newest=None)], "Hello|msgpack"),
    ([header("AssetGet", sha256="AB" * 32, offset=0, length=1)], "AssetGet: sha256"), ([header("AssetGet", sha256=SHA, offset=0, length=0)], "length"),
    ([header("AssetGet", sha256=SHA, offset=0, length=CHUNK + 1)], "length"), ([header("AssetData", sha256=SHA, offset=0), b"x" * (CHUNK + 1)], "AssetData: data"),
    ([header("Report", offer="0f" * 16, error=None), b"[1]"], "Report: result"), ([header("Report", offer="0f" * 16, error=None), b"["], "Report: result"),
    ([header("Report", offer="0f" * 16, error=None), b"[" * 100_000], "Report: result"), ([header("Report", offer="0f" * 16, error=None), b"\xff"], "result"),
    ([header("Report", offer="0f" * 16, error=None), json.dumps({"a": "x" * MAX_DOCUMENT}).encode()], "Report: result"),
    ([header("Heartbeat", status={"a": [1]})], "Heartbeat: status"), ([header("Heartbeat", status={"a" * n: n for n in range(65)})], "Heartbeat: status"),
])
def test_hostile_frames_are_refused_by_name(parts, what):
    with pytest.raises(PeerError, match=what):
        decode(parts)


@pytest.mark.parametrize("names", [["../config.json"], ["config.json", "config.json"], ["embedding"], [""], ["/etc/passwd"]])
def test_only_known_file_names_are_offered(names):
    fields = {"offer": "0f" * 16, "run": "r", "step": 1, "contract_hash": SHA, "files": [{"name": n, "size": 1, "sha256": SHA} for n in names]}
    with pytest.raises(PeerError, match="CheckpointOffer: files"):
        decode([header("CheckpointOffer", **fields), b"{}"])


def test_another_version_is_named_whatever_follows_it():
    with pytest.raises(e.Differs, match=f"version: {e.VERSION} -> 99") as caught:
        decode([msgpack.packb([99, {"anything": 1}, 2, 3])])
    assert caught.value.fields == (f"version: {e.VERSION} -> 99",)


def test_what_the_other_end_would_refuse_is_a_bug_here():
    for bad in (e.Ack(-2), e.Bye("x" * 5000), e.SampleData("1", b""), e.Welcome({}, "s", 0, 0, (e.FileInfo("weights", 1, SHA),), {})):
        with pytest.raises(e.LocalError, match=type(bad).__name__):
            encode(bad)
    assert "weights" not in ASSET_NAMES


anything = st.recursive(st.none() | st.booleans() | st.integers(-2**63, 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
                        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8)


def refused_or_whole(parts):
    try:
        message = decode(parts)
    except PeerError:
        return
    assert repr(decode(encode(message))) == repr(message)          # repr: NaN in a status is unequal to itself


@given(st.lists(st.binary(max_size=64), max_size=4))
@settings(max_examples=150)
def test_random_bytes_raise_nothing_but_peer_error(parts):
    refused_or_whole(parts)


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=250)
def test_mutated_messages_raise_nothing_but_peer_error(message, data):
    first, *rest = encode(message)
    version, kind, fields = msgpack.unpackb(first)
    if fields and data.draw(st.booleans()):
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(anything)
        parts = [msgpack.packb([version, kind, fields]), *rest]
    else:
        parts = [bytearray(part) for part in (first, *rest)]
        part = parts[data.draw(st.integers(0, len(parts) - 1))]
        for _ in range(data.draw(st.integers(1, 3))):
            if part:
                part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
        parts = [bytes(part) for part in parts]
    refused_or_whole(parts)
