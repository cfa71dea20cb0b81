import dataclasses
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common.capture import Capture
from common.errors import CaptureError, CorruptError
from protocol import codec, planes
from tests.protocol.samples import CONTRACT, STREAM, capture, sample


def round_trip(given_: Capture) -> bytes:
    data = codec.encode(given_, stream=STREAM, seq=7, contract=CONTRACT.hash)
    got = codec.decode(memoryview(data))
    assert (got.stream, got.seq, got.contract) == (STREAM, 7, CONTRACT.hash)
    for field in dataclasses.fields(Capture):
        want, back = getattr(given_, field.name), getattr(got.capture, field.name)
        assert back == want if field.name == "prompt" else back.dtype == want.dtype and np.array_equal(back, want), field.name
    header = codec.verify(data)
    assert header == codec.read_header(data) and (header.tokens, header.taps, header.hidden) == given_.taps.shape[1::-1] + given_.taps.shape[2:]
    return data


def plain_split(piece: list[int], base: list[int]) -> tuple[bytes, list[int], list[tuple[int, int]]]:
    """planes.split, a value at a time, written from the format's description."""
    half = (len(piece) + 15) // 16 * 8
    nibbles, remainders, escapes = [0] * (2 * half), [0] * (2 * half), []
    for i, (value, channel) in enumerate(zip(piece, base)):
        word = (value - channel) % 65536
        sign, exponent, mantissa = word >> 15, word >> 7 & 255, word & 127
        nibbles[i] = min(exponent, 15)
        remainders[i] = sign << 15 | mantissa
        if exponent >= 15:
            escapes.append((i, exponent))
    pairs = bytes(nibbles[i] | nibbles[half + i] << 4 for i in range(half))
    swapped = [(word & 255) << 8 | word >> 8 for word in remainders[half:]]
    return pairs, [a | b for a, b in zip(remainders, swapped)], escapes


@given(st.data())
def test_the_fast_split_is_the_plain_one_and_merge_undoes_it(data):
    hidden, tokens = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    anything = rng.integers(0, 65536, (tokens, hidden)).astype(np.uint16)
    plane = data.draw(st.sampled_from([anything, anything & 0x83FF, capture(tokens, hidden, 1).final]))
    channel = data.draw(st.sampled_from([planes.channel_base(plane), rng.integers(0, 256, hidden).astype(np.uint8)]))
    base = planes.tiled(channel, tokens)
    planes.scratch.words[:], planes.scratch.rest[:] = 0xFFFF, 0xFFFF                       # what an earlier piece may have left
    pairs, rest, where, what = planes.split(plane.reshape(-1), base)
    assert (pairs.tobytes(), rest.tolist(), list(zip(where.tolist(), what.tolist()))) == plain_split(plane.reshape(-1).tolist(), base.tolist())
    out = np.empty(plane.size, np.uint16)
    pairs, rest = pairs.copy(), rest.copy()                                  # they are views of what merge uses
    planes.merge(pairs.tobytes(), rest.tobytes(), where, what, base, out=out)
    assert np.array_equal(out, plane.reshape(-1))


def test_all_bit_patterns_come_back():
    """NaN, Inf, denormals, -0: 65536 patterns, in an order where every channel sees all exponents, and in one where it sees one."""
    patterns = np.arange(65536, dtype=np.uint16)
    round_trip(capture(states=patterns.reshape(2, 256, 128)))
    round_trip(capture(states=np.ascontiguousarray(patterns.reshape(2, 128, 256).swapaxes(1, 2))))


@pytest.mark.parametrize("value", [0x0000, 0x8000, 0x7F80, 0xFFFF, 0x0001, 0x3F80])
def test_constant_planes_come_back(value):
    round_trip(capture(states=np.full((3, 40, 24), value, np.uint16)))


@pytest.mark.parametrize("tokens, hidden, taps", [(1, 1, 1), (1, 7, 3), (2, 128, 1), (63, 24, 2), (64, 24, 2), (130, 2048, 1)])
def test_shapes_come_back(tokens, hidden, taps):
    round_trip(capture(tokens, hidden, taps))


def test_pieces_are_cut_at_rows_and_put_together_again(monkeypatch):
    monkeypatch.setattr(planes, "PIECE", 100)
    assert [len(piece) for piece in planes.cut(np.zeros((11, 24), np.uint16))] == [96, 96, 72]
    for tokens in (3, 4, 5, 8, 9):
        round_trip(capture(tokens))
    monkeypatch.setattr(planes, "PIECE", 10)                                 # fewer values than one row
    round_trip(capture(3))


def test_a_sample_of_noise_larger_than_a_megabyte_comes_back():
    """Nothing compresses, nearly everything escapes, and the side buffer exceeds zstd's default window."""
    noise = np.random.default_rng(0).integers(0, 65536, (2, 512, 600)).astype(np.uint16)
    data = round_trip(capture(states=noise))
    assert codec.read_header(data).side_bytes > 1 << 21 or codec.read_header(data).escapes > 500_000


def test_states_like_a_targets_shrink_to_two_thirds():
    given_ = capture(512, 256, 2)
    assert (given_.taps.nbytes + given_.final.nbytes) / len(round_trip(given_)) > 1.45


def test_threads_do_not_share_what_they_work_in():
    given_ = [capture(300, 256, 2, seed) for seed in range(8)]
    alone = [codec.encode(c, stream=STREAM, seq=0, contract=CONTRACT.hash) for c in given_]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda c: codec.encode(c, stream=STREAM, seq=0, contract=CONTRACT.hash), given_)) == alone
            assert all(np.array_equal(got.capture.taps, c.taps) for got, c in zip(pool.map(codec.decode, alone), given_))


def test_views_that_are_not_contiguous_are_encoded_as_what_they_show():
    states = capture(20, 24, 4).taps
    round_trip(capture(states=states[::2, ::2, ::3]))


@pytest.mark.parametrize("states", [np.zeros((3, 0, 4), np.uint16), np.zeros((1, 4, 4), np.uint16), np.zeros((3, 4, 0), np.uint16)])
def test_no_tokens_no_taps_no_channels_are_refused(states):
    with pytest.raises(CaptureError):
        codec.encode(capture(states=states), stream=STREAM, seq=0, contract=CONTRACT.hash)


@pytest.mark.parametrize("field, value", [("seq", -1), ("seq", 1 << 60), ("contract", "short"), ("stream", "x" * 129), ("stream", "\u00e9")])
def test_what_no_header_holds_is_refused_at_the_source(field, value):
    with pytest.raises(CaptureError, match=field):
        codec.encode(capture(), **{"stream": STREAM, "seq": 0, "contract": CONTRACT.hash, field: value})


SMALL = sample(3, tokens=9)
EVEN = codec.encode(capture(states=np.full((2, 40, 24), 0x3F80, np.uint16)), stream=STREAM, seq=5, contract=CONTRACT.hash)   # all compresses
BROKEN = sample(4, tokens=30, hidden=64)                                     # frames with real Huffman tables


@pytest.mark.parametrize("data", [SMALL, EVEN])
def test_every_flipped_bit_is_found(data):
    for at in range(len(data)):
        for bit in range(8):
            spoilt = bytearray(data)
            spoilt[at] ^= 1 << bit
            with pytest.raises(CorruptError):
                codec.verify(spoilt)


@settings(max_examples=300)
@given(st.integers(0, len(BROKEN) - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(at, change):
    spoilt = bytearray(BROKEN)
    spoilt[at] ^= change
    with pytest.raises(CorruptError):
        codec.verify(spoilt)
    with pytest.raises(CorruptError):
        codec.decode(spoilt)


@given(st.integers(0, len(BROKEN) - 1))
def test_any_cut_and_any_extension_is_found_by_the_header_alone(length):
    for data in (BROKEN[:length], BROKEN + BROKEN[:length + 1], BROKEN + b"\0"):
        with pytest.raises(CorruptError):
            codec.read_header(data)


@given(st.binary(max_size=200))
def test_noise_is_no_sample(data):
    for given_ in (data, codec.MAGIC + data, BROKEN[:24] + data):
        with pytest.raises(CorruptError):
            codec.decode(given_)


def test_exchanged_frames_are_found():
    """Two planes of equal size, each frame whole: only the seals and the bases tell them apart, so make those equal too."""
    header = codec.read_header(BROKEN)
    body = BROKEN[len(BROKEN) - header.body_bytes:]
    with pytest.raises(CorruptError):
        codec.decode(BROKEN[:-header.body_bytes] + body[len(body) // 3:] + body[:len(body) // 3])


def forged(side: bytes | None = None, **changes: object) -> bytes:
    """BROKEN with other header fields (or another side buffer) and right checksums: what an enemy can send."""
    header = dataclasses.asdict(codec.read_header(BROKEN))
    rest = BROKEN[len(BROKEN) - header["body_bytes"] - header["side_bytes"]:]
    if side is not None:
        rest = side + rest[header["side_bytes"]:]
        header |= {"side_bytes": len(side), "side_crc": zlib.crc32(side)}
    header = {name: value for name, value in (header | changes).items() if value is not None}
    packed = msgpack.packb(header)
    start = struct.pack("<8sHHI", codec.MAGIC, codec.VERSION, 0, len(packed))
    return start + struct.pack("<I", zlib.crc32(start + packed)) + packed + rest


def test_the_forger_forges():
    assert codec.verify(forged()) == codec.read_header(BROKEN)


@pytest.mark.parametrize("changes", [{name: value} for name in ("tokens", "taps", "hidden", "probes", "escapes", "side_bytes", "body_bytes")
                                     for value in (2**40, 2**62, -1, 2.0, "3", None, True, [1])]
                         + [{"tokens": 0}, {"taps": 0}, {"hidden": 0}, {"seq": -1}, {"seq": None}, {"contract": "A" * 64}, {"stream": 5},
                            {"stream": b"x"}, {"prompt": "x" * 200}, {"extra": 1}, {"tokens": 2**20, "hidden": 2**16}, {"tokens": 31},
                            {"tokens": 29}, {"hidden": 65}, {"taps": 3}, {"taps": 1}, {"probes": 5}, {"escapes": 1000},
                            {"tokens": 2**20, "hidden": 100}])
def test_a_forged_header_is_refused_before_anything_is_allocated(changes, monkeypatch):
    def refuse(shape, *_):
        raise AssertionError(f"allocated {shape}")
    monkeypatch.setattr(codec.np, "empty", refuse)
    with pytest.raises(CorruptError):
        codec.decode(forged(**changes))


def bomb(size: int) -> bytes:
    """A zstd frame that claims `size` bytes and is a few bytes long."""
    return b"\x28\xb5\x2f\xfd\xe4" + size.to_bytes(8, "little") + b"\x03\0\0\0" * 4


def test_frames_that_claim_more_than_the_header_are_not_unpacked():
    header = codec.read_header(BROKEN)
    with pytest.raises(CorruptError, match="another size"):
        codec.decode(forged(side=bomb(2**40)))
    side = {"lengths": np.array([len(bomb(0)), 0] * 3), "seals": np.array([codec._seal(bomb(2**40), 960), 0] * 3)}
    with pytest.raises(CorruptError, match="another size"):
        next(codec._read_frames(memoryview(bomb(2**40) * 3), side, header))


def side_with(name_at: int, value: bytes) -> bytes:
    header = codec.read_header(BROKEN)
    start = len(BROKEN) - header.body_bytes - header.side_bytes
    raw = bytearray(zstandard.ZstdDecompressor().decompress(BROKEN[start:start + header.side_bytes]))
    raw[name_at:name_at + len(value)] = value
    return zstandard.ZstdCompressor(write_checksum=True).compress(bytes(raw))


@pytest.mark.parametrize("at, value, says", [
    (30 * 4, b"\2", "loss mask"), (30 * 5, b"\x1e\0\0\0", "probe rows"), (30 * 5, b"\xff\xff\xff\xff", "probe rows"),
    (30 * 5 + 6 * 8 + 3 * 64, b"\xff\xff\xff\xff", "add up"), (30 * 5 + 6 * 8 + 3 * 64 + 48, b"\xff\xff\xff\xff", "add up")])
def test_side_arrays_are_checked_against_the_header(at, value, says):
    with pytest.raises(CorruptError, match=says):
        codec.decode(forged(side=side_with(at, value)))


def test_an_escape_outside_its_piece_is_refused():
    states = np.random.default_rng(1).integers(0, 65536, (2, 4, 8)).astype(np.uint16)
    data = codec.encode(capture(states=states), stream=STREAM, seq=0, contract=CONTRACT.hash)
    side = dict(codec._open(data)[1])
    assert side["positions"].max() < 32 and len(side["positions"]) > 10
    header = codec.read_header(data)
    start = len(data) - header.body_bytes - header.side_bytes
    raw = bytearray(zstandard.ZstdDecompressor().decompress(data[start:start + header.side_bytes]))
    raw[-5 * header.escapes:-5 * header.escapes + 4] = (32).to_bytes(4, "little")
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(raw))
    with pytest.raises(CorruptError, match="outside its piece"):
        codec._read_side(memoryview(frame), dataclasses.replace(header, side_bytes=len(frame), side_crc=zlib.crc32(frame)))


def test_importing_the_protocol_leaves_torch_unloaded():
    code = "import sys, protocol.codec, protocol.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
