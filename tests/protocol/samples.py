"""Small captures and samples for the protocol's tests."""
from __future__ import annotations

import numpy as np

from common.capture import Capture, to_bf16
from common.contract import ExtractionContract
from protocol import codec

CONTRACT = ExtractionContract(target="toy", weights="a" * 64, tokenizer="b" * 64, chat_template="", thinking=None, taps=(1, 3), n_layers=6,
                              hidden_size=24, vocab_size=64, mask_token_id=63, dtype="float32", delta_rule="", versions={"numpy": "2"})
STREAM = "0123456789abcdef"


def capture(tokens: int = 12, hidden: int = 24, taps: int = 2, seed: int = 0, states: np.ndarray | None = None) -> Capture:
    """Hidden states like a target's: normal, one scale a channel; or the given bf16 bits (taps + 1, tokens, hidden)."""
    rng = np.random.default_rng(seed)
    if states is None:
        states = to_bf16((rng.normal(size=(taps + 1, tokens, hidden)) * 2.0 ** rng.normal(0, 3, hidden)).astype(np.float32))
    rows = np.arange(0, states.shape[1], 5, dtype=np.int32)
    return Capture(ids=rng.integers(0, 63, states.shape[1]).astype(np.int32), loss_mask=rng.random(states.shape[1]) < 0.5,
                   taps=states[:-1], final=states[-1], probe_rows=rows, probe_tokens=rows + 1, prompt="cafe")


def sample(seq: int, **shape: int) -> bytes:
    return codec.encode(capture(seed=seq, **shape), stream=STREAM, seq=seq, contract=CONTRACT.hash)
