"""The target: the one file that loads transformers models and reads hidden states out of them.

Taps come from forward hooks on just the layers asked for, the final state from a hook on the final norm.  Hooks live
for one forward and are gone after it; nothing of transformers is patched.  Left out: which tokens to run (generate,
speculate) and how a cache is rolled back (rollback).
"""
from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

from common import device as devices
from common.capture import Capture, check_states
from common.contract import ExtractionContract
from common.errors import CaptureError, UserError
from producer import embedded, experts as choice, identity, packed, smollm2, weights

PROBES = 2              # rows a capture whose argmax the trainer repeats; picked among twice as many, for each costs a row of lm_head
CHUNK = 64              # tokens: the padding of transformers' torch_chunk_gated_delta_rule
RESCALED = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


@dataclass(frozen=True)
class Forward:
    logits: Tensor          # [b, kept, V], compute dtype
    taps: Tensor | None     # [K, b, T, H], compute dtype: the residual stream after each layer asked for; None for none
    final: Tensor           # [b, T, H] after the final norm, as lm_head reads it


class Target:
    """A frozen model, its tokenizer and what both boxes must know about them.

    name, model, tokenizer, device, dtype as given; text is the inner model that owns .layers and .norm; embedding and
    head are [V, H] weights (one tensor where the model ties them); eos_ids and mask_token_id by producer.identity;
    rule_is_fp32: several tokens go through transformers' own delta rule, which computes in fp32 and pads to CHUNK.
    Raises UserError for a model whose logits are not head @ final: the trainer would teach another distribution.
    """

    def __init__(self, name: str, model: nn.Module, tokenizer, *, mask_token: int | None = None) -> None:
        self.name, self.model, self.tokenizer = name, model.eval().requires_grad_(False), tokenizer
        self.text = _text_model(model)
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        self.embedding, self.head, self._head = model.get_input_embeddings().weight, head.weight, head
        self.device, self.dtype = self.head.device, self.head.dtype
        self.n_layers, (self.vocab_size, self.hidden_size) = len(self.text.layers), self.head.shape
        self.is_hybrid = any(hasattr(layer, "linear_attn") for layer in self.text.layers)
        self.delta_rule = identity.delta_rule(self.text)
        self.eos_ids = identity.end_tokens(model, tokenizer)
        self.mask_token_id = identity.mask_token(tokenizer, self.vocab_size, self.eos_ids, mask_token)
        self.rule_is_fp32 = "transformers:torch_chunk_gated_delta_rule" in self.delta_rule
        self._cache_keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        rescaled = [key for key in RESCALED if getattr(config, key, None) not in (None, 1, 1.0)]
        if rescaled or head.bias is not None or self.embedding.shape != self.head.shape:
            raise UserError(f"{name}: {rescaled[0] if rescaled else 'an lm_head with a bias or another shape than the embedding'}"
                            " is not supported: logits must be lm_head @ final state")
        probe = self.forward(torch.arange(min(8, self.vocab_size), device=self.device)[None], logits_to_keep=0)
        plain = F.linear(probe.final, self.head)                     # the weights alone; packed ones round otherwise
        if not torch.allclose(probe.logits, plain, rtol=0, atol=1e-5 * float(plain.abs().max())):
            raise UserError(f"{name}: the model's logits are not lm_head @ final state; this architecture is not supported")

    @torch.inference_mode()
    def forward(self, ids: Tensor, *, cache: DynamicCache | None = None, taps: tuple[int, ...] = (),
                logits_to_keep: int | Tensor = 1, attention_mask: Tensor | None = None,
                position_ids: Tensor | None = None, short: bool = False) -> Forward:
        """One forward of ids [b, T] int64, continuing `cache` (which it fills) where one is given.

        logits_to_keep  n: the last n rows' logits; 0: all; a 1-d int64 tensor: those rows
        attention_mask  [b, past + T] 1 for tokens, 0 for padding;  position_ids [b, T]
        short           do not let transformers' own delta rule pad T tokens to a chunk of CHUNK (a fifth of a verify on a small target)
        """
        extra = {"attention_mask": attention_mask, "position_ids": position_ids, self._cache_keyword: cache}
        if short and self.rule_is_fp32 and ids.shape[1] < CHUNK:
            extra["chunk_size"] = ids.shape[1]                       # handed down to the rule as it is: the sum is the same, unpadded
        with self._listen(taps) as (heard, final):
            out = self.model(input_ids=ids, use_cache=cache is not None, logits_to_keep=logits_to_keep,
                             **{key: value for key, value in extra.items() if value is not None})
        stacked = torch.stack([heard[tap] for tap in taps]) if taps else None
        return Forward(out.logits, stacked, final[0])

    @contextlib.contextmanager
    def _listen(self, taps: tuple[int, ...]) -> Iterator[tuple[dict[int, Tensor], list[Tensor]]]:
        """Hooks on these layers' outputs and on the final norm's, for one forward."""
        if bad := [tap for tap in taps if not 0 <= tap < self.n_layers]:
            raise ValueError(f"tap {bad[0]} of a target with {self.n_layers} layers")
        heard: dict[int, Tensor] = {}
        final: list[Tensor] = []

        def on_layer(tap: int):
            return lambda _module, _args, out: heard.__setitem__(tap, out[0] if isinstance(out, tuple) else out)
        hooks = [self.text.layers[tap].register_forward_hook(on_layer(tap)) for tap in taps]
        hooks.append(self.text.norm.register_forward_hook(lambda _module, _args, out: final.append(out)))
        try:
            yield heard, final
        finally:
            for hook in hooks:
                hook.remove()

    def new_cache(self) -> DynamicCache:
        """An empty cache with the layers this target needs (without the config it would hold keys and values only)."""
        return DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def logits(self, final: Tensor) -> Tensor:
        """final [..., H] -> logits [..., V]; equal to the model's own, checked when the target is made."""
        return self._head(final)

    @torch.inference_mode()
    def capture(self, ids: np.ndarray | list[int], loss_mask: np.ndarray | list[bool], taps: tuple[int, ...],
                prompt: str = "") -> Capture:
        """One sequence, computed alone (batch 1, whole), so that nothing beside it can change a bit of it.

        ids (T,) ints, loss_mask (T,) bool.  Raises CaptureError: the mask token or a foreign id among ids, states that
        cannot be right (by layer and row), or a bf16 final state on which lm_head gives other logits than the model gave.
        """
        ids, loss_mask = np.array(ids, np.int32), np.array(loss_mask, np.bool_)     # copies: the capture owns its arrays
        if ids.shape != loss_mask.shape or ids.ndim != 1 or not len(ids):
            raise CaptureError(f"ids {ids.shape} and loss mask {loss_mask.shape} are not one sequence")
        if (ids == self.mask_token_id).any():
            raise CaptureError(f"row {int(np.argmax(ids == self.mask_token_id))}: the mask token {self.mask_token_id} among ids; "
                               "if the target writes it, choose another with --mask-token")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise CaptureError(f"ids run from {ids.min()} to {ids.max()}, the target has {self.vocab_size}")
        rows, more = (torch.linspace(0, len(ids) - 1, min(count, len(ids))).round().long().to(self.device) for count in (2 * PROBES, 64))
        out = self.forward(torch.from_numpy(ids).long()[None].to(self.device), taps=taps, logits_to_keep=rows)
        kept, tokens, given = _clearest(out.logits[0], rows)
        if not len(kept):
            kept, tokens, given = _clearest(self.logits(out.final[0, more]), more)
        capture = Capture(ids, loss_mask, _bits(out.taps[:, 0]), _bits(out.final[0]), kept.cpu().numpy().astype(np.int32),
                          tokens[:, 0].cpu().numpy().astype(np.int32), prompt)
        check_states(capture, taps)
        if not len(kept):
            raise CaptureError("no row whose first token stands clear of the second: lm_head cannot be checked on this sequence")
        products = out.final[0, kept].bfloat16().float()[:, None] * self.head[tokens].float()       # [P, 2, H]
        read = products.sum(-1)
        wrong = (read[:, 0] <= read[:, 1]) | ((read - given).abs() > products.abs().sum(-1) / 128).any(-1)
        if wrong.any():
            raise CaptureError(f"final state, row {int(kept[wrong][0])}: lm_head gives other logits on it than the model gave")
        return capture

    def contract(self, taps: tuple[int, ...], thinking: bool | None) -> ExtractionContract:
        return ExtractionContract(
            target=self.name, weights=self.fingerprint, tokenizer=identity.tokenizer(self.tokenizer),
            chat_template=identity.chat_template(self.tokenizer), thinking=thinking, taps=taps, n_layers=self.n_layers,
            hidden_size=self.hidden_size, vocab_size=self.vocab_size, mask_token_id=self.mask_token_id,
            dtype=str(self.dtype).removeprefix("torch."), delta_rule=self.delta_rule, versions=identity.versions(self.model))

    @functools.cached_property
    def fingerprint(self) -> str:
        return identity.weights(self.model)


def _clearest(logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Up to PROBES rows whose first token stands clearest above the second: bf16 rounding must not turn them.

    By more than 1/64 of the logit: four bf16 steps, where rounding moves either by about one.
    logits [R, V] of rows [R] -> rows [P] ascending; their first and second token [P, 2], and those tokens' logits [P, 2]
    """
    top = logits.float().topk(2, -1)
    margin = top.values[:, 0] - top.values[:, 1] - top.values[:, 0].abs() / 64
    clear = margin.topk(min(PROBES, len(rows))).indices.sort().values
    clear = clear[margin[clear] > 0]
    return rows[clear], top.indices[clear], top.values[clear]


def _bits(values: Tensor) -> np.ndarray:
    return values.bfloat16().view(torch.int16).cpu().numpy().view(np.uint16)


def _text_model(model: nn.Module) -> nn.Module:
    base = model.base_model
    for text in (getattr(base, "language_model", base), base):
        if isinstance(getattr(text, "layers", None), nn.ModuleList) and isinstance(getattr(text, "norm", None), nn.Module):
            return text
    raise UserError(f"{type(model).__name__}: no decoder with .layers and a final .norm found; this architecture is not supported")


def locate(name: str) -> Path:
    """embedded | smollm2 | a folder | a hub id in the local Hugging Face cache -> the target's folder.  No network."""
    if name == "embedded":
        folder = embedded.FOLDER
    elif name == "smollm2":
        folder = smollm2.folder()
    elif Path(name).expanduser().is_dir():
        folder = Path(name).expanduser()
    else:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            raise UserError(f"--target {name}: no such folder, and not in {constants.HF_HUB_CACHE}; fetch it with "
                            f"`hf download {name}`, or use embedded or smollm2") from None
    if not (folder / "config.json").is_file():
        raise UserError(f"--target {name}: {folder} holds no config.json, so no Hugging Face model")
    return folder


@dataclass(frozen=True)
class Sizes:
    """As Target has them."""

    n_layers: int
    hidden_size: int
    vocab_size: int


def sizes(name: str) -> Sizes:
    """Of a target, from its config alone: taps and drafters are checked before 70 GB are read (pitfall L2)."""
    folder = locate(name)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        return Sizes(config.num_hidden_layers, config.hidden_size, config.vocab_size)
    except (OSError, ValueError, AttributeError) as error:               # no JSON; a type transformers does not know; no decoder
        raise UserError(f"--target {name}: {folder / 'config.json'}: {str(error).strip().splitlines()[0]}") from None


def layer_count(name: str) -> int:
    return sizes(name).n_layers


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """tokenizer.json as it stands.  AutoTokenizer would rebuild it by the model's type (seen in 5.24 for qwen3_5: other
    pre-tokenizer, normaliser and an added id beyond the embedding), so what the folder's owner made would not be used."""
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} holds no tokenizer.json: spans of tokens cannot be found without a fast tokenizer")
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def load(name: str, *, dtype: str = "auto", device: str = "auto", mask_token: int | None = None, experts: str | None = None,
         say: Callable[[str], None] = logging.getLogger("hsprod").info) -> Target:
    """Find, read and check a target.  dtype auto: float32 on a CPU, bfloat16 on a GPU.  Raises UserError.

    experts: one of producer.experts.NAMES; auto: the fastest here, by stop-watch, and say is told which; None: transformers' choice.

    Weights are read one by one into memory of their own (weights), then moved parameter by parameter, each host copy freed
    as its device copy stands: on a GPU that shares the host's memory (Strix Halo) they exist once, and one weight twice.
    """
    folder = locate(name)
    where = devices.named(device)
    kind = {"auto": torch.float32 if where.type == "cpu" else torch.bfloat16, "float32": torch.float32,
            "bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
    if kind is None:
        raise UserError(f"--dtype {dtype}: choose auto, float32, bfloat16 or float16")
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()                                 # it warns of torch kernels; the contract records which run
    tokenizer = read_tokenizer(folder)
    model = weights.read(folder, kind).to(where)
    if experts == "auto":
        choice.auto(model, tokenizer, say=say)
    elif experts is not None:
        choice.use(model, experts)
    packed.pack(model)
    return Target(name, model, tokenizer, mask_token=mask_token)
