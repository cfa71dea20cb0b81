"""One capture of random numbers, and an embedding, the same bits on both sides of step.py.  Imports torch and common.capture alone."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.capture import Capture, to_bf16


def embedding_of(shape: dict) -> Tensor:
    """(V, H) fp32: embedding and head in one, of the size that gives logits of a few units."""
    generator = torch.Generator().manual_seed(1)
    return torch.empty(shape["vocab_size"], shape["hidden_size"]).normal_(0.0, shape["hidden_size"] ** -0.5, generator=generator)


def random_capture(shape: dict, tokens: int) -> Capture:
    """Every token supervised.  No probes: there is no target whose head could have given them."""
    rng = np.random.default_rng(2)
    states = to_bf16(rng.standard_normal((len(shape["dflash_config"]["target_layer_ids"]) + 1, tokens, shape["hidden_size"]), np.float32))
    ids = rng.integers(0, shape["dflash_config"]["mask_token_id"], tokens).astype(np.int32)
    none = np.zeros(0, np.int32)
    return Capture(ids, np.ones(tokens, bool), states[:-1], states[-1], none, none)
