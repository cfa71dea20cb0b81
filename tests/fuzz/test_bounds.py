"""Each bound that the fuzzer leans on, one by one and with its number: where it lies, and that just below is taken."""
from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import jsons
from common.capture import parse_taps
from common.drafter.config import MOST, DrafterConfig, shape_for
from common.errors import MOST_TEXT, CaptureError, CorruptError, PeerError, UserError, one_line
from producer.daemon import check_fits
from protocol import codec, events as e
from protocol.frames import decode, encode
from protocol.offers import MAX_HANDED, Offers
from protocol.peer_session import MOST_NAMED, StreamFacts, judge
from protocol.transfer import PartFile, Pull, offer_id
from tests.fuzz import seeds
from tests.fuzz.readers import folder
from tests.protocol.samples import CONTRACT, STREAM, capture, sample
from trainer.batch import check_probes
from trainer.formats import gguf_bounds
from trainer.inbox import check_shape

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("depth, taken", [(jsons.MOST_DEPTH, True), (jsons.MOST_DEPTH + 1, False), (100_000, False)])
@pytest.mark.parametrize("opens, closes", [("[", "]"), ('{"a":', "}")])
def test_json_is_so_deep_and_no_deeper(depth, taken, opens, closes):
    text = opens * depth + ("1" if opens != "[" else "") + closes * depth
    if taken:
        assert json.loads(text) == jsons.loads(text) and len(repr(jsons.loads(text))) > depth
    else:
        with pytest.raises(ValueError, match="nested"):
            jsons.loads(text)


def test_a_peers_words_are_one_bounded_printable_line():
    assert one_line("taps: 1 -> 2, \u00e9") == "taps: 1 -> 2, \u00e9" and one_line("a\nb\x1b[31m\udc80") == "a b [31m "
    assert len(one_line("x" * (MOST_TEXT + 1))) == MOST_TEXT == len(str(PeerError("x" * 10**6)))
    assert decode(encode(e.Bye("a\n<3>b"))) == e.Bye("a <3>b")


@pytest.mark.parametrize("name", MOST)
def test_a_drafters_shape_is_bounded_field_by_field(name):
    shape = seeds.tiny().config
    assert getattr(shape, name) <= MOST[name]
    with pytest.raises(ValueError, match=f"{name} is .*at most {MOST[name]}"):
        dataclasses.replace(shape, **{name: type(MOST[name])(MOST[name] * 2)})
    data = shape.to_json()
    for table in (data, data["dflash_config"], data["rope_parameters"]):
        if name in table:
            table[name] = 10 ** 400
    with pytest.raises(CorruptError, match=name):
        DrafterConfig.from_json(data)


def test_a_contract_that_differs_in_a_thousand_fields_is_refused_in_one_header():
    """Found by trainer_says: the producer's own Refuse was too long to be sent, and its thread ended."""
    facts = StreamFacts(STREAM, CONTRACT, (), {})
    theirs = CONTRACT.to_dict() | {"versions": {"\U0001f600" * 200 + str(n): "9" * 200 for n in range(1000)}}
    refuse = judge(e.Hello("a", STREAM, 0, theirs, True), facts, 0, 5)
    assert decode(encode(refuse)) == refuse and len(refuse.fields) == MOST_NAMED + 1 and refuse.fields[-1] == f"{1001 - MOST_NAMED} more"


def test_checkpoints_that_wait_are_so_many_and_no_more(tmp_path):
    offers = Offers(tmp_path)

    def offer(run: str, step: int) -> None:
        offers.arrived(offers.fetch("box", e.CheckpointOffer(offer_id(run, step, ()), run, step, "", (), {})))
    for n in range(MAX_HANDED):
        offer(f"run{n}", 1)
    with pytest.raises(PeerError, match=f"{MAX_HANDED} checkpoints wait"):
        offer("another", 1)
    offer("run3", 2)                                     # in its older one's place
    assert offers.inbox.qsize() == MAX_HANDED and offers.counters["replaced_checkpoints"] == 1
    offers.reported(offers.inbox.get_nowait(), {}, None)
    offer("another", 1)


@pytest.mark.parametrize("changes, positions, says", [
    ({}, 64, None), ({}, 65, "knows 64 positions; prompts and new tokens here need 65"), ({"vocab_size": 17}, 9, "vocabulary is 17, the target's 16"),
    ({"taps": (0, 4)}, 9, "taps"), ({"hidden_size": 8}, 9, "hidden size"), ({"mask_token_id": 3}, 9, "mask token")])
def test_a_checkpoint_that_this_target_cannot_run_is_refused_before_it_does(changes, positions, says):
    """Positions and vocabulary: they ended the producer with a ValueError in the middle of an evaluation."""
    ours = seeds.tiny().config
    contract = dataclasses.replace(CONTRACT, taps=ours.taps, hidden_size=ours.hidden_size, vocab_size=ours.vocab_size,
                                   mask_token_id=ours.mask_token_id)
    config, record = dataclasses.replace(ours, **changes), {"contract": contract.hash}
    if says is None:
        check_fits(config, record, contract, positions)
    else:
        with pytest.raises(CorruptError, match=says):
            check_fits(config, record, contract, positions)
    with pytest.raises(CorruptError, match="contract is None"):
        check_fits(ours, {}, contract, 1)


def test_escapes_are_checked_piece_by_piece_without_a_wider_copy(monkeypatch):
    """Where each escape lies was checked against sizes repeated for each: 8 bytes of memory for one of the message."""
    noise = np.random.default_rng(0).integers(0, 65536, (3, 40, 64)).astype(np.uint16)
    data = codec.encode(capture(states=noise), stream=STREAM, seq=0, contract=CONTRACT.hash)
    assert codec.read_header(data).escapes > 5000
    monkeypatch.setattr(codec.np, "repeat", lambda *_: pytest.fail("repeated"))
    codec.verify(data)


def gguf(*, array: int = 3, text: int = 2, fields: int = 2, tensors: int = 1, dims: int = 2, kind: int = 0) -> bytes:
    """Two keys (an array of bytes, a text) and a tensor; the numbers are what the file says, not what stands there."""
    key = struct.pack("<Q", 1) + b"k"
    return (b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + key + struct.pack("<IIQ", 9, kind, array) + b"abc"
            + key + struct.pack("<IQ", 8, text) + b"ab" + key + struct.pack("<IQQIQ", dims, 1, 1, 0, 0))


def test_a_gguf_that_announces_more_than_it_has_is_refused_at_once(tmp_path):
    """Found by gguf: the package's reader went on past the end, for as many items as the file said."""
    def check(data: bytes) -> None:
        (tmp_path / "a").write_bytes(data)
        gguf_bounds.check(tmp_path / "a")
    check(gguf())
    huge = 2 ** 60
    for wrong in (gguf(array=huge), gguf(array=2 ** 23), gguf(array=huge, kind=8), gguf(array=1, kind=9), gguf(kind=99), gguf(text=huge),
                  gguf(text=2 ** 64 - 1), gguf(fields=huge), gguf(tensors=huge), gguf(tensors=2), gguf(dims=5), gguf(dims=4), gguf()[:-1],
                  gguf()[:24], b"GGUF", b""):
        with pytest.raises(CorruptError, match="no whole GGUF file"):
            check(wrong)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"{}", b'{"written_at": 1, "pid": "../self", "started": 3}', b"[" * 10_000])
def test_a_status_that_is_none_is_one_line_for_a_person(text, tmp_path):
    from common import status
    (tmp_path / "status.json").write_bytes(text)
    with pytest.raises(UserError, match="status.json is damaged, or of another version") as caught:
        status.screen([tmp_path / "status.json"], "hsprod serve", lambda values, now: [("doing", values["doing"])], 1.0)
    assert "\n" not in str(caught.value)


# What could run code that a file holds.  safetensors, msgpack and JSON hold none.
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "yaml"}


def test_nothing_here_unpickles_or_evaluates():
    for path in (path for package in ("common", "protocol", "producer", "trainer") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & UNSAFE, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "eval", "exec", "__import__"), (path, called)
                if called in ("np.load", "numpy.load"):
                    assert any(k.arg == "allow_pickle" and ast.unparse(k.value) == "False" for k in node.keywords), (path, node.lineno)


@pytest.mark.parametrize("hidden", [0, -1, (1 << 16) + 1, 2 ** 60 + 128 * 7, 2 ** 63])
def test_a_contract_off_the_wire_makes_no_shape_without_end(hidden):
    """2**60 and a bit: a search for a divisor of the heads that went on for ever."""
    with pytest.raises(UserError, match="hidden_size"):
        shape_for(hidden, 64, 8, (1, 4), 2, "mixed")


@pytest.mark.parametrize("taps, hidden, fits", [(2, 24, True), (1, 24, False), (3, 24, False), (2, 23, False)])
def test_a_sample_of_another_shape_than_the_contracts_is_not_acknowledged(taps, hidden, fits):
    header = codec.read_header(sample(7, tokens=4, taps=taps, hidden=hidden))
    if fits:
        check_shape(header, CONTRACT.to_dict())
    else:
        with pytest.raises(CorruptError, match=f"sample 7: {taps} taps {hidden} wide, the contract says 2 taps 24 wide"):
            check_shape(header, CONTRACT.to_dict())


@pytest.mark.parametrize("field, value", [("ids", 64), ("ids", -1), ("probe_tokens", 64), ("probe_tokens", -1)])
def test_a_token_that_the_target_does_not_have_is_named(field, value):
    given_ = capture(6)
    array = getattr(given_, field).copy()
    array[-1] = value
    with pytest.raises(CaptureError, match=rf"token ids run from .*{value}.*, the target has 64"):
        check_probes(dataclasses.replace(given_, **{field: array}), torch.zeros(64, 24))
    check_probes(given_, torch.zeros(64, 24))


@settings(max_examples=60)
@given(st.binary(max_size=60), st.binary(max_size=40), st.integers(0, 40))
def test_whatever_stands_in_a_part_of_a_file_it_ends_as_what_was_announced_or_not_at_all(left, content, damaged):
    """The part may be of an older file, of nobody's, or longer than the file is."""
    info = e.FileInfo("embedding", len(content), hashlib.sha256(content).hexdigest())
    with folder() as path:
        (path / "a.part").write_bytes(left)
        part = PartFile(path / "a", info)
        assert part.have <= info.size
        sent = bytearray(content)
        if damaged < len(content):
            sent[damaged] ^= 1
        pull = Pull(info.size, part.have)
        for offset, length in pull.asks():
            part.write(offset, bytes(sent[offset:offset + length]))
            pull.arrived(offset, length)
        try:
            part.finish()
        except CorruptError:
            assert not list(path.iterdir())
        else:
            assert [p.name for p in path.iterdir()] == ["a"] and (path / "a").read_bytes() == content


@settings(max_examples=300)
@given(st.text(max_size=12) | st.text("0123456789,-+_ auto:", max_size=12) | st.integers(-3, 99).map("auto:{}".format), st.integers(3, 64))
def test_any_words_for_layers_are_legal_taps_or_the_persons_mistake(text, n_layers):
    try:
        taps = parse_taps(text, n_layers)
    except UserError:
        return
    assert taps and list(taps) == sorted(set(taps)) and 0 <= taps[0] and taps[-1] <= n_layers - 2
