"""Which target this is, in bits: fingerprints and names for the extraction contract (pitfalls A3, R5).

Pure readers of a loaded model and tokenizer.  Nothing here loads, runs or changes them.
"""
from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys

import torch
from torch import nn

from common.errors import UserError
from producer import packed

SAMPLES = 4096          # elements hashed of each parameter: 0.2 s for 135M parameters, and grows with their number, not their size
UNUSED = "<repo_name>"  # SmolLM2's tokenizer has no mask token and no room above it, but this special token, which chat never uses


def weights(model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """sha256 hex over every parameter's name, shape, dtype and about SAMPLES of its elements, evenly strided.

    Parameters of up to SAMPLES elements are read whole.  An edit that touches only elements between the strides of
    larger ones is missed; fine-tuning, merging, another dtype or quantisation move nearly all elements and are seen.
    The stride is odd, so that the sample does not stay in a few columns of a matrix of even width.
    dtype: as if the model had been loaded in it; the same bits only where the one dtype holds what the other was read from.
    """
    own = model.get_output_embeddings().weight.dtype if dtype is not None else None
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        flat = value.detach().flatten()
        sample = flat[::max(1, flat.numel() // SAMPLES) | 1].contiguous()
        if value.dtype == own:                                       # what a model keeps in another dtype it keeps in either
            sample = sample.to(dtype)
        digest.update(f"{name} {tuple(value.shape)} {sample.dtype}\n".encode())
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def tokenizer(tok) -> str:
    """sha256 hex over the fast tokenizer's whole JSON (vocabulary, merges, normaliser, special tokens)."""
    state = json.loads(tok.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None                    # set by whoever called it last: not identity
    return _sha(json.dumps(state, sort_keys=True))


def chat_template(tok) -> str:
    """sha256 hex of the chat template (of all, where there are several by name); "" without one."""
    template = tok.chat_template
    return _sha(template if isinstance(template, str) else json.dumps(template, sort_keys=True)) if template else ""


def delta_rule(text: nn.Module) -> str:
    """'package:function' of every function that the linear layers will really run, sorted; "" on a dense target.

    transformers wraps each torch function in a closure that calls fla or causal-conv1d where they are installed
    (5.15 and later); the closure's `implementation` is read.  A build without it is named by the function as it stands.
    """
    mixers = {type(layer.linear_attn) for layer in text.layers if hasattr(layer, "linear_attn")}
    found = set()
    for mixer in mixers:
        functions = vars(sys.modules[mixer.__module__])
        for name, function in functions.items():
            if callable(function) and ("gated_delta_rule" in name or "causal_conv1d" in name):
                found.add(_origin(_implementation(function)))
    return " ".join(sorted(found)) or " ".join(sorted(m.__name__ for m in mixers))


def _implementation(function):
    for _ in range(4):                                               # a decorator or two may sit around the closure
        cells = dict(zip(getattr(getattr(function, "__code__", None), "co_freevars", ()), function.__closure__ or ()))
        inner = cells.get("implementation")
        if inner is None:
            return function
        function = inner.cell_contents
    return function


def _origin(function) -> str:
    return f"{function.__module__.partition('.')[0]}:{function.__name__}"


def versions(model: nn.Module) -> dict[str, str]:
    """Libraries and choices inside transformers whose change may change a bit of a capture."""
    found = {"experts": str(getattr(model.config, "_experts_implementation", None)),
             "attention": str(getattr(model.config, "_attn_implementation", None)),
             "linear": "packed" if packed.is_packed(model) else "torch", "torch": torch.__version__}
    for package in ("transformers", "tokenizers", "flash-linear-attention", "causal-conv1d", "kernels"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def end_tokens(model: nn.Module, tok) -> frozenset[int]:
    """Ids that end an answer, by any of the three places that may name them.  UserError where none does."""
    places = (getattr(model, "generation_config", None), model.config, tok)
    named = [getattr(place, "eos_token_id", None) for place in places]
    ids = frozenset(i for n in named if n is not None for i in (n if isinstance(n, (list, tuple)) else [n]))
    if not ids:
        raise UserError("this target names no end token (generation_config, config or tokenizer): answers would never end")
    return ids


def mask_token(tok, rows: int, eos: frozenset[int], override: int | None = None) -> int:
    """A row of the embedding (`rows` of them) that no text holds and the target never emits (pitfall C4).

    The first row after the tokenizer's ids where there is one (Qwen3.6: 248077); else the tokenizer's own mask
    token; else the special token UNUSED; never the pad token.  `override` is --mask-token.  UserError otherwise.
    """
    vocab = tok.get_vocab()
    if override is not None:
        if not 0 <= override < rows or override in eos:
            raise UserError(f"--mask-token {override}: choose 0 to {rows - 1}, and not an end token")
        return override
    if max(vocab.values()) + 1 < rows:
        return max(vocab.values()) + 1
    if tok.mask_token_id is not None:
        return tok.mask_token_id
    if UNUSED in tok.all_special_tokens or vocab.get(UNUSED) in tok.added_tokens_decoder:
        return vocab[UNUSED]
    raise UserError(f"no free row after the tokenizer's {rows} ids and no mask token: give --mask-token ID, an id that the "
                    "target never emits")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
