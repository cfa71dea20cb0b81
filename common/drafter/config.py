"""The shape of one drafter, and the JSON layout in which z-lab releases it (read by SGLang, vLLM and llama.cpp too).

Only what the code reads is in the dataclass (pitfall A1: keys copied from the target trained one model and served
another).  What the layout can say and this code does not do is refused by name, never skipped."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from common.errors import CorruptError, UserError

SLIDING, FULL = "sliding_attention", "full_attention"
IS_CAUSAL = {"causal": True, "bidi": False, "mixed": None}      # mixed: key absent, the released rule by layer type

# Said in every config we write; a config that says otherwise is another network.
FIXED = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
         "attention_dropout": 0.0, "tie_word_embeddings": False,
         "sample_from_anchor": False}                           # slot 0 is never supervised (pitfall A4)
AUTO_MAP = {"AutoModel": "dflash.DFlashDraftModel"}             # for transformers' remote-code loader; ours has no use for it

# Legal in others' configs, at the top or in dflash_config or rope_parameters, and changing the maths unless neutral.
NEUTRAL = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None, "causal": None,
           "use_swa": False, "swa_window_size": None, "conv_kernel_size": None, "conv_group_size": None, "selector_rank": None,
           "selector_top_k": None, "projector_type": None, "sample_from_anchor": False, "rope_scaling": None,
           "partial_rotary_factor": 1.0, "mrope_section": None}


# A config comes off the wire: bounds far above any drafter's, so that no number makes layers, tables or memory without end.
MOST = {"hidden_size": 1 << 16, "num_hidden_layers": 256, "num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 4096,
        "intermediate_size": 1 << 20, "vocab_size": 1 << 24, "max_position_embeddings": 1 << 26, "num_target_layers": 4096, "block_size": 256,
        "rms_norm_eps": 1.0, "rope_theta": 1e15}


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of one DFlash drafter; travels in every checkpoint.  An impossible shape raises ValueError."""

    hidden_size: int                # the target's: embedding, taps and head are shared with it
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int                 # rows of the target's embedding
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int    # positions; a longer context is refused
    layer_types: tuple[str, ...]    # one of SLIDING, FULL for each layer
    sliding_window: int | None      # W of the sliding layers, in tokens; None iff there are none
    attention: Literal["causal", "bidi", "mixed"]   # inside the block; geometry.layer_rule
    block_size: int                 # positions per block, the known token at slot 0 included
    taps: tuple[int, ...]           # target layers read, from 0: the residual stream after layer i
    mask_token_id: int              # a row of the target's embedding that it never emits (pitfall C4)
    num_target_layers: int

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            _must(0 < getattr(self, name) <= most, f"{name} is {getattr(self, name)}, must be positive and at most {most}")
        _must(self.block_size >= 2, f"block_size is {self.block_size}; a block has at least one drafted slot")
        _must(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}, must be even (rotary pairs)")
        _must(self.num_attention_heads % self.num_key_value_heads == 0,
              f"num_key_value_heads {self.num_key_value_heads} does not divide num_attention_heads {self.num_attention_heads}")
        _must(len(self.layer_types) == self.num_hidden_layers and set(self.layer_types) <= {SLIDING, FULL},
              f"layer_types {self.layer_types} must name {self.num_hidden_layers} layers, each {SLIDING} or {FULL}")
        if SLIDING in self.layer_types:
            _must(self.sliding_window is not None and self.sliding_window >= 1, "sliding_window is missing or not positive")
        else:
            _must(self.sliding_window is None, "sliding_window is set, no layer slides")
        _must(self.attention in IS_CAUSAL, f"attention is {self.attention!r}, must be one of {', '.join(IS_CAUSAL)}")
        _must(self.taps and list(self.taps) == sorted(set(self.taps)), f"taps {self.taps} must ascend")
        _must(0 <= self.taps[0] and self.taps[-1] <= self.num_target_layers - 2,
              f"taps {self.taps} must lie within 0 to {self.num_target_layers - 2} (num_target_layers - 2)")
        _must(0 <= self.mask_token_id < self.vocab_size, f"mask_token_id {self.mask_token_id} is no row of {self.vocab_size}")

    def to_json(self) -> dict[str, Any]:
        """The released layout, plus the duplicates that older readers want (block_size, rope_theta at the top)."""
        data = FIXED | {"auto_map": dict(AUTO_MAP)} | {name: getattr(self, name) for name in PLAIN}
        data |= {"layer_types": list(self.layer_types), "block_size": self.block_size, "rope_theta": self.rope_theta,
                 "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
                 "dflash_config": {"block_size": self.block_size, "mask_token_id": self.mask_token_id,
                                   "target_layer_ids": list(self.taps)}}
        if self.sliding_window is not None:                     # transformers' Qwen3Config drops the one without the other
            data |= {"use_sliding_window": True, "sliding_window": self.sliding_window}
        if IS_CAUSAL[self.attention] is not None:
            data["is_causal"] = IS_CAUSAL[self.attention]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DrafterConfig:
        """The current layout and the April 2026 preview's (block_size, rope_theta at the top).  CorruptError names the key."""
        dflash, rope = _table(data, "dflash_config"), _table(data, "rope_parameters", default={})
        _refuse_unlike(data, dflash, rope)
        values = {name: _one(data, name, kind) for name, kind in PLAIN.items()}
        layer_types = tuple(_list(data, "layer_types", str))
        if SLIDING in layer_types and data.get("use_sliding_window") is not True:
            raise CorruptError("drafter config: layers slide, but use_sliding_window is not true (some readers then drop the window)")
        causal = data.get("is_causal")
        if not (causal is None or type(causal) is bool):
            raise CorruptError(f"drafter config: is_causal is {causal!r}")
        try:
            return cls(**values, layer_types=layer_types,
                       sliding_window=_one(data, "sliding_window", int) if SLIDING in layer_types else None,
                       attention=next(name for name, value in IS_CAUSAL.items() if value is causal),
                       block_size=_agreed("block_size", int, dflash, data), rope_theta=_agreed("rope_theta", float, rope, data),
                       mask_token_id=_one(dflash, "mask_token_id", int), taps=tuple(_list(dflash, "target_layer_ids", int)))
        except ValueError as error:
            raise CorruptError(f"drafter config: {error}") from None


PLAIN = {"hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int, "num_key_value_heads": int, "head_dim": int,
         "intermediate_size": int, "vocab_size": int, "rms_norm_eps": float, "max_position_embeddings": int,
         "num_target_layers": int}                              # keys that stand in the layout under their own names


def shape_for(hidden_size: int, vocab_size: int, n_layers: int, taps: tuple[int, ...], mask_token_id: int,
              attention: str, *, all_sliding: bool = False, **overrides: Any) -> DrafterConfig:
    """The default drafter for a target of n_layers layers; overrides are fields of DrafterConfig.  UserError if impossible.

    Every layer slides but the last, which sees all of the text; all_sliding: that one slides too.

    From 1024 up it is the released drafter of Qwen3.6-35B-A3B (dflash-facts 1.1), scaled in heads and width; below, the
    small one of the demo targets (embedded-target-facts.md, smollm2-facts.md)."""
    if not 0 < hidden_size <= MOST["hidden_size"]:              # it comes off the wire, and what follows counts up to it
        raise UserError(f"drafter shape: hidden_size is {hidden_size}, must be positive and at most {MOST['hidden_size']}")
    if hidden_size >= 1024:
        head_dim, heads = 128, 2 * hidden_size // 128
        shape = dict(num_hidden_layers=6, head_dim=head_dim, num_attention_heads=heads,
                     num_key_value_heads=_divisor(heads, heads // 4), intermediate_size=3 * hidden_size, rope_theta=1e7,
                     max_position_embeddings=262144, sliding_window=4096, block_size=16)
    else:
        head_dim = 64 if hidden_size >= 256 and hidden_size % 64 == 0 else 32
        heads = max(1, hidden_size // head_dim)
        shape = dict(num_hidden_layers=2, head_dim=head_dim, num_attention_heads=heads,
                     num_key_value_heads=_divisor(heads, heads // 2), intermediate_size=128 * -(-hidden_size * 8 // (3 * 128)),
                     rope_theta=1e4, max_position_embeddings=8192, sliding_window=512, block_size=8)
    shape |= dict(rms_norm_eps=1e-6) | overrides
    shape.setdefault("layer_types", (SLIDING,) * (shape["num_hidden_layers"] - 1) + (SLIDING if all_sliding else FULL,))
    if SLIDING not in shape["layer_types"] and "sliding_window" not in overrides:
        shape["sliding_window"] = None
    try:
        return DrafterConfig(hidden_size=hidden_size, vocab_size=vocab_size, num_target_layers=n_layers, taps=tuple(taps),
                             mask_token_id=mask_token_id, attention=attention, **shape)
    except (ValueError, TypeError) as error:
        raise UserError(f"drafter shape: {error}") from None


def _divisor(heads: int, most: int) -> int:
    """The largest divisor of heads that is not above most (at least 1)."""
    return next(n for n in range(max(1, most), 0, -1) if heads % n == 0)


def _must(holds: object, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _refuse_unlike(data: dict, dflash: dict, rope: dict) -> None:
    for name, value in FIXED.items():
        if data.get(name, value) != value:
            raise CorruptError(f"drafter config: {name} is {data[name]!r}, this code knows {value!r} only")
    if rope.get("rope_type", "default") != "default":
        raise CorruptError(f"drafter config: rope_type is {rope['rope_type']!r}, this code knows 'default' only")
    for where, table in (("", data), ("dflash_config.", dflash), ("rope_parameters.", rope)):
        for name, neutral in NEUTRAL.items():
            if table.get(name, neutral) not in (neutral, None):
                raise CorruptError(f"drafter config: {where}{name} = {table[name]!r} is not supported")
    if unknown := set(dflash) - set(NEUTRAL) - {"block_size", "mask_token_id", "target_layer_ids"}:
        raise CorruptError(f"drafter config: dflash_config.{min(unknown)} is not known")


def _table(data: dict, name: str, default: dict | None = None) -> dict:
    table = data.get(name) if isinstance(data, dict) else None
    table = default if table is None else table
    if not isinstance(table, dict):
        raise CorruptError(f"drafter config: {name} is missing or not a table")
    return table


def _one(data: dict, name: str, kind: type) -> Any:
    if name not in data:
        raise CorruptError(f"drafter config: {name} is missing")
    value = data[name]
    if type(value) is int and kind is float:
        return float(min(value, 1 << 62))                       # beyond any bound all the same, and never an OverflowError
    if type(value) is not kind:
        raise CorruptError(f"drafter config: {name} is {value!r}, expected {kind.__name__}")
    return value


def _list(data: dict, name: str, kind: type) -> list:
    values = _one(data, name, list)
    if not all(type(value) is kind for value in values):
        raise CorruptError(f"drafter config: {name} is {values!r}, expected a list of {kind.__name__}")
    return values


def _agreed(name: str, kind: type, *tables: dict) -> Any:
    """The key's value in whichever tables have it; two that differ are refused."""
    values = [_one(table, name, kind) for table in tables if name in table]
    if not values:
        raise CorruptError(f"drafter config: {name} is missing")
    if len(set(values)) > 1:
        raise CorruptError(f"drafter config: {name} is {values[0]} in one place and {values[1]} in another")
    return values[0]
