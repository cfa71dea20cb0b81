"""Valid inputs for each target, made by our own code: where the fuzzer starts.  A test holds that every one of them is taken."""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from common.drafter import checkpoint
from common.drafter.config import FULL, SLIDING, shape_for
from common.drafter.model import Drafter
from producer import seen as producer_seen
from protocol import events as e
from protocol import keys as key_files
from protocol.frames import encode
from protocol.transfer import offer_id
from tests.fuzz.readers import folder
from tests.fuzz.shapes import join
from tests.fuzz.talks import ASSETS, CHECKPOINT, MESSAGE, MORE, SAMPLES, TIME, WORK, step
from tests.protocol.samples import CONTRACT, STREAM, sample
from trainer import seen as trainer_seen
from trainer.formats import gguf, speculators

HASH = CONTRACT.hash
FILES = tuple(e.FileInfo(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in sorted(CHECKPOINT.items()))
STATUS = {"doing": "training", "run": "/r", "run_name": "r", "arm": "ce", "address": "tcp://10.0.0.1:5757", "acceptance": "tau 3.1",
          "stream": "receiving",
          "numbers": {number.name: 3 for number in (*producer_seen.NUMBERS, *trainer_seen.NUMBERS)} | {"first_sample": 1, "disk_used_bytes": 5e9},
          "counters": {"refused": 2}, "troubles": {"warning": 3}, "written_at": 990.0, "pid": 1, "started": "1", "unwritten_status": 0,
          "last": {"warning": {"at": 940.0, "text": "link: cut"}},
          "trainers": {"old": {"connected": False, "follower": False, "acked": 9, "lag": 32, "lag_bytes": 5 * 10 ** 9, "sole_bytes": 10, "credit": 0,
                               "last_seen_s": None, "away_s": 86400.0}}}


def messages() -> list[e.Message]:
    """One of each kind at least."""
    offer = offer_id("run", 7, FILES)
    return [e.Hello("box-1", None, 0, None, True), e.Hello("box:arm", "s1", 7, CONTRACT.to_dict(), False), e.Credit(1 << 40), e.Ack(-1), e.SampleGet(3),
            e.AssetGet(HASH, 3, 5), e.CheckpointOffer(offer, "run", 7, HASH, FILES, {"arm": "ce", "loss": [1.5, None]}),
            e.CheckpointData(offer, "config.json", 0, b"abc"),
            e.Welcome(CONTRACT.to_dict(), "s1", 0, 9, (e.FileInfo("lm_head", 1, HASH),), {"n": 3}), e.Refuse("no", ("taps: 1 -> 2",)),
            e.SampleData(3, b"\0" * 10), e.SampleAgain(3, b""), e.AssetData(HASH, 0, b"x"), e.CheckpointGet(offer, "config.json", 0, 9),
            e.Report(offer, {"tau": 2.5}, None), e.Report(offer, {}, "failed"), e.StreamHeartbeat(9, True, {"a": 1}), e.Heartbeat({}),
            e.Bye("enough")]


def frames() -> list[bytes]:
    return [join(encode(message)) for message in messages()]


def samples() -> list[bytes]:
    return [sample(0, tokens=1, hidden=1, taps=1), sample(3, tokens=9), sample(4, tokens=30, hidden=64)]


def store() -> list[bytes]:
    meta = json.dumps({"stream": STREAM, "contract": CONTRACT.to_dict(), "first": 0}).encode()
    return [join([meta]), join([meta, *SAMPLES]), join([meta, SAMPLES[0]])]


def cursors() -> list[bytes]:
    return [json.dumps({"stream": "s1", "acked": {"box-1": 4, "b": -1}, "seen": {"box-1": 1.7e9}}).encode()]


def keys() -> list[bytes]:
    with folder() as path:
        public = key_files.generate(path)
        return [join([(path / key_files.SECRET).read_bytes(), f"# trainers\n{public} the box\n\n{public}\n".encode(), public.encode()])]


def state() -> list[bytes]:
    return [json.dumps(values).encode() for values in (STATUS, STATUS | {"trainers": {}, "last_trouble": None})]


def tiny(**changes) -> Drafter:
    small = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=2, intermediate_size=4, block_size=4, rope_theta=1e4,
                 max_position_embeddings=64, num_hidden_layers=2, layer_types=(SLIDING, FULL), sliding_window=6)
    drafter = Drafter(shape_for(4, 16, 8, (1, 4), 2, "bidi", **small | changes), torch.Generator().manual_seed(0))
    return drafter.to(torch.bfloat16).requires_grad_(False)


def _listed() -> Drafter:
    drafter = tiny()
    drafter.shortlist = torch.tensor([0, 2, 3, 7])
    return drafter


def _folder(path: Path) -> bytes:
    names = (checkpoint.CONFIG, checkpoint.RECORD, checkpoint.WEIGHTS, checkpoint.SHORTLIST)
    return join([(path / name).read_bytes() if (path / name).exists() else b"" for name in names])


def drafters() -> list[bytes]:
    with folder() as path:
        checkpoint.save(path / "a", tiny(), {"contract": HASH, "arm": "ce"})
        checkpoint.save(path / "b", _listed(), {"contract": HASH})
        head = torch.zeros(4, 4)
        speculators.write(path / "c", tiny(), {"step": 1}, "f16", head=None, target="t")
        speculators.write(path / "d", _listed(), {"step": 1}, "bf16", head=head, target="t")
        return [_folder(path / name) for name in "abcd"]


def tensors() -> list[bytes]:
    with folder() as path:
        checkpoint.save(path / "a", _listed(), {})
        return [(path / "a" / name).read_bytes() for name in (checkpoint.WEIGHTS, checkpoint.SHORTLIST)]


def ggufs() -> list[bytes]:
    from gguf import GGUFValueType as K
    words = [("tokenizer.ggml.tokens", [f"t{i}" for i in range(16)], K.ARRAY, K.STRING)]
    made = []
    with folder() as path:
        for drafter, quant, head in ((tiny(), "bf16", None), (_listed(), "f16", torch.zeros(4, 4)),
                                     (tiny(layer_types=(FULL, FULL), sliding_window=None), "bf16", None)):
            gguf.write(path / "d.gguf", drafter, {"step": 1}, quant, keys=words, head=head)
            made.append((path / "d.gguf").read_bytes())
    return made


def trainers_words() -> list[bytes]:
    offer = e.CheckpointOffer(offer_id("run", 7, FILES), "run", 7, HASH, FILES, {"arm": "ce"})
    embedding = hashlib.sha256(ASSETS["embedding"]).hexdigest()
    hello = e.Hello("box", None, 0, None, True)
    stream = [hello, e.Credit(10_000), e.AssetGet(embedding, 0, 100), e.AssetGet(embedding, 100, 80), e.Ack(0), e.Ack(2), e.Heartbeat({"state": "x"})]
    pulled = [e.CheckpointData(offer.offer, name, 0, content) for name, content in CHECKPOINT.items()]
    again = e.Hello("box", STREAM, 2, CONTRACT.to_dict(), True)
    return [join([_said(m) for m in stream]), join([_said(hello), _said(offer), *map(_said, pulled), step(WORK), _said(e.Bye("done"))]),
            join([_said(again), step(MORE), _said(e.Credit(500)), step(TIME), _said(e.Ack(2))]),
            join([_said(hello), _said(e.Hello("other", None, 0, None, False), 1), _said(offer, 1), step(TIME), _said(e.Credit(9), 0),
                  *[_said(p, 1) for p in pulled], step(WORK), _said(offer, 1)])]


def producers_words() -> list[bytes]:
    assets = tuple(e.FileInfo(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in ASSETS.items())
    offer = offer_id("run", 7, FILES)
    begin = [e.Welcome(CONTRACT.to_dict(), STREAM, 0, len(SAMPLES), assets, {"prompts": "x"})]
    begin += [e.AssetData(info.sha256, 0, ASSETS[info.name]) for info in assets]
    samples_ = [e.SampleData(seq, data) for seq, data in enumerate(SAMPLES)]
    asked = [e.CheckpointGet(offer, info.name, 0, info.size) for info in FILES]
    end = [_said(e.StreamHeartbeat(3, True, {"tokens": 5})), _said(e.Bye("stops"))]
    return [join([*map(_said, begin + samples_), *end]),
            join([*map(_said, begin), step(WORK)[:1] + b"\7", *map(_said, asked + samples_), _said(e.Report(offer, {"tau": 2.5}, None)),
                  step(TIME), *end])]


def _said(message: e.Message, who: int = 0) -> bytes:
    return step(MESSAGE, encode(message), who)
