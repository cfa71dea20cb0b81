"""Tiny targets with random weights, made in a second: the user's hybrid architecture and a dense one, and their tokenizer.

Random weights would give nearly flat logits and constant greedy text, so the head and router are scaled and the delta
rule's decays spread (half-lives of about 1 to 500 tokens).
"""
from __future__ import annotations

import functools
import math

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from producer.target import Target

SPECIAL = ["<|im_end|>", "<|pad|>", "<|mask|>", "<|im_start|>", "<think>", "</think>"]
EOS, PAD, MASK = 0, 1, 2
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@functools.cache
def _backend(size: int) -> str:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = [f"def f{i}(x): return x + {i}  # the user asks, the assistant answers number {i}\n" for i in range(50)]
    tok.train_from_iterator(text, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tok.to_str()


def tokenizer(template: str | None = None, size: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text can be written.  Fewer than `size` ids, should the text run out of merges."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_backend(size)), eos_token=SPECIAL[EOS], pad_token=SPECIAL[PAD],
                                   mask_token=SPECIAL[MASK], additional_special_tokens=SPECIAL[3:], chat_template=template)


def hybrid(seed: int = 0, *, dtype: torch.dtype = torch.float32, hidden: int = 64, experts: int = 8, template: str | None = None) -> Target:
    """qwen3_5_moe, 8 layers: 3 Gated DeltaNet and 1 attention, twice."""
    tok = tokenizer(template)
    config = Qwen3_5MoeTextConfig(
        vocab_size=len(tok), hidden_size=hidden, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
        num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        tie_word_embeddings=False, max_position_embeddings=4096, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
                         "mrope_interleaved": True})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5MoeForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        model.lm_head.weight[MASK] = 0                               # a target never emits its mask token
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(20)
            if hasattr(layer, "linear_attn"):
                heads = len(layer.linear_attn.A_log)
                layer.linear_attn.A_log.copy_(torch.linspace(0, math.log(8), heads))
                layer.linear_attn.dt_bias.copy_(torch.linspace(-5, -2, heads))
    return Target("tiny-hybrid", model.to(dtype), tok)


def dense(seed: int = 0, *, dtype: torch.dtype = torch.float32, layers: int = 4, template: str | None = None) -> Target:
    """llama, tied embeddings."""
    tok = tokenizer(template)
    config = LlamaConfig(vocab_size=len(tok), hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=True,
                         eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[MASK] = 0
    return Target("tiny-dense", model.to(dtype), tok)
