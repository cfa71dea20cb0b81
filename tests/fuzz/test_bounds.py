"""Each bound that the fuzzer leans on, one by one and with its number: where it lies, and that just below is taken."""
from __future__ import annotations

import ast
import dataclasses
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from common import jsons
from common.drafter.config import MOST, DrafterConfig
from common.errors import MOST_TEXT, CorruptError, PeerError, UserError, one_line
from producer.daemon import check_fits
from protocol import codec, events as e
from protocol.frames import decode, encode
from protocol.offers import MAX_HANDED, Offers
from protocol.peer_session import MOST_NAMED, StreamFacts, judge
from protocol.transfer import offer_id
from tests.fuzz import seeds
from tests.protocol.samples import CONTRACT, STREAM, capture
from trainer.formats import gguf_bounds

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
    assert offers.inbox.qsize() == MAX_HANDED and offers.counters["replaced"] == 1
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
