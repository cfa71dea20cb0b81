"""A checkpoint is whole and right, or refused by the key's name (pitfalls C2, C3)."""
from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from common import files
from common.drafter import checkpoint
from common.drafter.checkpoint import checkpoint_hash, load, save
from common.drafter.config import shape_for
from common.drafter.model import Drafter
from common.errors import CorruptError

RECORD = {"arm": "ce_causal", "seed": 1, "step": 20, "versions": {"torch": "x"}}


def drafter(seed: int = 0) -> Drafter:
    return Drafter(shape_for(32, 64, 8, (1, 4), 2, "mixed"), torch.Generator().manual_seed(seed))


@pytest.fixture
def folder(tmp_path) -> Path:
    save(tmp_path / "step-20", drafter(), RECORD)
    return tmp_path / "step-20"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_trip(tmp_path, dtype):
    made = drafter()
    save(tmp_path / "c", made, RECORD, dtype)
    got, config, record = load(tmp_path / "c", "cpu", torch.float32)
    assert config == made.config and record == RECORD
    for name, value in made.state_dict().items():
        assert got.state_dict()[name].dtype == torch.float32 and torch.equal(got.state_dict()[name], value.to(dtype).float()), name
    assert all(weight.requires_grad for weight in got.parameters())
    block, anchors, taps = torch.randn(1, 4, 32), torch.tensor([[3]]), torch.randn(1, 9, 64)
    if dtype is torch.float32:
        assert torch.equal(got(block, anchors, taps), made(block, anchors, taps))


def test_the_folder_is_the_released_format(folder):
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "record.json"]
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} and set(file.keys()) == set(drafter().state_dict())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    (folder / "record.json").unlink()                                  # somebody else's release has none
    assert load(folder, "cpu", torch.bfloat16)[2] == {}


def test_hash_is_of_what_decides_a_draft(folder, tmp_path):
    save(tmp_path / "same", drafter(), {"another": "record"})
    save(tmp_path / "other", drafter(1), RECORD)
    assert checkpoint_hash(folder) == checkpoint_hash(tmp_path / "same") != checkpoint_hash(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": True}))
    assert checkpoint_hash(folder) != checkpoint_hash(tmp_path / "same")


def rewrite(folder: Path, change) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NAME = "layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("change, says", [
    (lambda t: t.pop(NAME), "is missing"),
    (lambda t: t.update({"lm_head.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}), "lm_head.weight is not part"),
    (lambda t: t.update({NAME: t[NAME][:-1].clone()}), "has shape"),
    (lambda t: t.update({NAME: t[NAME].float()}), "is F32"),
    (lambda t: t.update({n: v.double() for n, v in t.items()}), "is F64"),
    (lambda t: t.update({NAME: t[NAME].to(torch.int8)}), "is I8"),
    (lambda t: t[NAME].view(-1)[3:4].fill_(float("nan")), "not finite"),
    (lambda t: t[NAME].view(-1)[3:4].fill_(float("-inf")), "not finite")])
def test_wrong_tensors_are_refused_by_name(folder, change, says):
    rewrite(folder, change)
    with pytest.raises(CorruptError, match=says) as caught:
        load(folder, "cpu", torch.float32)
    assert NAME in str(caught.value) or says.startswith("lm_head") or says == "is F64"


def test_dtype_that_the_config_contradicts_is_refused(folder):
    rewrite(folder, lambda t: t.update({n: v.half() for n, v in t.items()}))
    with pytest.raises(CorruptError, match="bfloat16"):
        load(folder, "cpu", torch.float32)


@pytest.mark.parametrize("size", [0, 3, 8, 40, -1, -1000])
def test_a_truncated_file_is_refused(folder, size):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:size])
    with pytest.raises(CorruptError, match="model.safetensors"):
        load(folder, "cpu", torch.float32)
    (folder / "model.safetensors").write_bytes(data + b"more")
    with pytest.raises(CorruptError, match=f"{len(data) + 4} bytes"):
        load(folder, "cpu", torch.float32)


@pytest.mark.parametrize("data", [
    struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", checkpoint.MOST_HEADER + 1) + bytes(checkpoint.MOST_HEADER + 2),
    struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 4) + b"\xff\xff{}", struct.pack("<Q", 9) + b'{"a": 12}',
    struct.pack("<Q", 50) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}'[:50],
    struct.pack("<Q", 55) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}'])
def test_a_hostile_header_is_refused(folder, data):
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptError):
        load(folder, "cpu", torch.float32)


def test_overlapping_tensors_are_refused(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header["layers.0.input_layernorm.weight"]["data_offsets"] = header["norm.weight"]["data_offsets"]
    text = json.dumps(header).encode().ljust(length)[:max(length, len(json.dumps(header)))]
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length:])
    with pytest.raises(CorruptError):
        load(folder, "cpu", torch.float32)


@pytest.mark.parametrize("name", ["config.json", "record.json"])
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b" " * (checkpoint.MOST_JSON + 1)])
def test_broken_json_is_refused(folder, name, text):
    (folder / name).write_bytes(text)
    with pytest.raises(CorruptError, match=name):
        load(folder, "cpu", torch.float32)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(CorruptError, match=name):
        load(folder, "cpu", torch.float32)


@pytest.mark.parametrize("stage", ["save_file", "_write_json", "publish_folder"])
def test_a_failed_save_leaves_the_older_checkpoint_and_no_rubbish(folder, monkeypatch, stage):
    def fail(*_args, **_kwargs):
        raise OSError("no space left on device")
    monkeypatch.setattr({"save_file": safetensors.torch, "publish_folder": files}.get(stage, checkpoint), stage, fail)
    before = checkpoint_hash(folder)
    with pytest.raises(OSError, match="no space"):
        save(folder, drafter(1), RECORD)
    assert checkpoint_hash(folder) == before and [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_killed_save_does_not_hinder_the_next(folder):
    """kill -9 leaves the temporary folder behind: the old checkpoint stands, and the next save clears it away."""
    rubbish = folder.with_name(f".{folder.name}.tmp")
    rubbish.mkdir()
    (rubbish / "stale").write_text("half")
    load(folder, "cpu", torch.float32)
    save(folder, drafter(1), RECORD)
    assert not rubbish.exists() and sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "record.json"]


def test_everything_is_on_disk_before_the_name_is(folder, monkeypatch):
    """fsync of each file and the folder comes before the older folder is put aside and the new one takes its name."""
    done = []
    monkeypatch.setattr(files.os, "fsync", lambda fd: done.append("fsync"))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append(f"{self.name} -> {to.name}"), rename(self, to))[1])
    save(folder, drafter(1), RECORD)
    name = folder.name
    assert done == ["fsync"] * 4 + [f"{name} -> .{name}.old", f".{name}.tmp -> {name}", "fsync"]


def test_an_unloadable_dtype_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="float64"):
        save(tmp_path / "c", drafter(), RECORD, torch.float64)
    assert not list(tmp_path.iterdir())
