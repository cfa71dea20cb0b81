"""The shape, the released layout, and that neither carries a key that nobody reads (pitfalls A1, A4, C4)."""
from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest

import common.drafter
from common.drafter.config import FULL, SLIDING, DrafterConfig, shape_for
from common.errors import CorruptError, UserError

TAPS35 = (1, 6, 11, 16, 22, 27, 32, 37)


def released(attention: str = "mixed", **overrides) -> DrafterConfig:
    return shape_for(2048, 248320, 40, TAPS35, 248077, attention, **overrides)


def preview() -> dict:
    """The April 2026 layout: all full attention, block_size and rope_theta at the top."""
    return {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 8,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 248320,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "num_target_layers": 40, "layer_types": [FULL] * 8,
            "sliding_window": None, "use_sliding_window": False, "rope_theta": 10000000, "rope_scaling": None, "block_size": 16,
            "dflash_config": {"mask_token_id": 248077, "target_layer_ids": [1, 10, 19, 28, 37]}}


def test_default_for_the_users_target_is_the_released_shape():
    data = released().to_json()
    want = {"hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 6144, "rms_norm_eps": 1e-6, "vocab_size": 248320, "max_position_embeddings": 262144,
            "num_target_layers": 40, "layer_types": [SLIDING] * 5 + [FULL], "sliding_window": 4096, "use_sliding_window": True,
            "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
            "dflash_config": {"block_size": 16, "mask_token_id": 248077, "target_layer_ids": list(TAPS35)}}
    assert {name: data[name] for name in want} == want
    assert "is_causal" not in data


@pytest.mark.parametrize("hidden, heads, kv, head_dim, inter", [(128, 4, 2, 32, 384), (576, 9, 3, 64, 1536), (64, 2, 1, 32, 256)])
def test_defaults_for_small_targets(hidden, heads, kv, head_dim, inter):
    c = shape_for(hidden, 1024, 8, (1, 2), 2, "bidi")
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size) == (heads, kv, head_dim, inter)
    assert (c.layer_types, c.sliding_window, c.block_size) == ((SLIDING, FULL), 512, 8)


def test_overrides_keep_the_shape_whole():
    assert released(num_hidden_layers=3).layer_types == (SLIDING, SLIDING, FULL)
    assert released(num_hidden_layers=1).sliding_window is None
    with pytest.raises(UserError, match="num_key_value_heads 5"):
        released(num_key_value_heads=5)
    with pytest.raises(UserError, match="nonsense"):
        released(nonsense=1)


@pytest.mark.parametrize("attention, said", [("causal", True), ("bidi", False), ("mixed", None)])
def test_round_trip(attention, said):
    for config in (released(attention), released(attention, layer_types=(FULL,) * 6), shape_for(128, 1024, 8, (1, 5), 2, attention)):
        data = config.to_json()
        assert data.get("is_causal") is said
        assert DrafterConfig.from_json(data) == config


def test_current_released_layout_is_read():
    data = released().to_json()
    for name in ("block_size", "rope_theta", "sample_from_anchor"):    # not in z-lab's own file
        del data[name]
    data |= {"transformers_version": "5.15.0", "use_cache": True, "max_window_layers": 6}
    assert DrafterConfig.from_json(data) == released()


def test_preview_layout_is_read():
    config = DrafterConfig.from_json(preview())
    assert (config.block_size, config.rope_theta, config.sliding_window, config.attention) == (16, 1e7, None, "mixed")
    assert (config.taps, config.num_key_value_heads, config.mask_token_id) == ((1, 10, 19, 28, 37), 4, 248077)


OPTIONAL = ("architectures", "model_type", "sliding_window", "use_sliding_window", "rope_scaling")


@pytest.mark.parametrize("where, name", [(where, name) for where, table in (("", preview()), ("dflash_config", preview()["dflash_config"]))
                                         for name in table if name not in OPTIONAL])
def test_a_missing_key_is_named(where, name):
    """mask_token_id among them: it never falls back to another token (C4)."""
    data = preview()
    del (data[where] if where else data)[name]
    with pytest.raises(CorruptError, match=name):
        DrafterConfig.from_json(data)


def leaves(data: dict, path: tuple = ()) -> list[tuple]:
    return [leaf for name, value in data.items()
            for leaf in (leaves(value, (*path, name)) if isinstance(value, dict) else [(*path, name)])]


def other(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 2
    return value[:-1] if isinstance(value, list) else value + "x"


@pytest.mark.parametrize("attention", ["causal", "bidi"])
def test_every_written_key_is_read(attention):
    """A1: change any key that we write and the reader refuses it or sees another drafter."""
    config = shape_for(128, 1024, 9, (1, 5), 2, attention)
    for path in leaves(config.to_json()):
        if path[0] == "auto_map":              # for transformers' remote-code loader
            continue
        data = copy.deepcopy(config.to_json())
        table = data
        for name in path[:-1]:
            table = table[name]
        table[path[-1]] = other(table[path[-1]])
        try:
            assert DrafterConfig.from_json(data) != config, path
        except CorruptError:
            pass


def test_every_field_is_read_by_code():
    sources = "".join(p.read_text() for p in Path(common.drafter.__path__[0]).glob("*.py") if p.name != "config.py")
    unread = [f.name for f in dataclasses.fields(DrafterConfig) if f"config.{f.name}" not in sources]
    assert unread == ["num_target_layers"]                             # it bounds taps, in config.py


@pytest.mark.parametrize("change, named", [
    ({"architectures": ["DFlash2DraftModel"]}, "architectures"), ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_bias": True}, "attention_bias"), ({"sample_from_anchor": True}, "sample_from_anchor"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"), ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
    ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn"}}, "rope_type"),
    ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ({"rope_theta": 1e6}, "rope_theta"), ({"block_size": 8}, "block_size"), ({"use_sliding_window": False}, "use_sliding_window"),
    ({"is_causal": "no"}, "is_causal"), ({"is_causal": 1}, "is_causal"),
    ({"hidden_size": "2048"}, "hidden_size"), ({"vocab_size": True}, "vocab_size"),
    ({"num_key_value_heads": 7}, "num_key_value_heads"), ({"layer_types": [FULL]}, "layer_types"),
    ({"vocab_size": 248077}, "mask_token_id"),
    ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [1], "block_size": 16, "selector_rank": 256}}, "selector_rank"),
    ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [1], "block_size": 16, "surprise": 1}}, "surprise"),
    ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [5, 1], "block_size": 16}}, "taps"),
    ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [39], "block_size": 16}}, "taps"),
    ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [-1, 3], "block_size": 16}}, "taps"),
    ({"dflash_config": [1]}, "dflash_config")])
def test_what_this_code_does_not_do_is_refused_by_name(change, named):
    with pytest.raises(CorruptError, match=named):
        DrafterConfig.from_json(released().to_json() | change)
