"""Our drafter as transformers' own DFlash generation wants its assistant (dflash-facts section 8).

    model.generate(ids, assistant_model=Assistant(drafter), speculation_type="dflash")

Its loop owns the cache: it hands over the taps of the tokens that stood since the last call and the embeddings of a block,
wants keys and values of both stored, and crops the block's own off before the next call.  So each call is one extend and one
draft.  Left out: batches and padding, which that loop refuses too, and saving: our folders are common.drafter.checkpoint's."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config
from transformers.modeling_outputs import BaseModelOutput

from common.drafter import geometry
from common.drafter.layers import attend, rope_tables
from common.drafter.model import Drafter


class Assistant(nn.Module):
    """What DFlashTokenCandidateGenerator reads in 5.24: device, config and forward.  Weights are the drafter's, shared."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter, shape = drafter, drafter.config
        self.config = Qwen3Config(**shape.to_json(), target_layer_ids=list(shape.taps), mask_token_id=shape.mask_token_id)

    @property
    def device(self) -> torch.device:
        return self.drafter.fc.weight.device

    def forward(self, noise_embeds: Tensor, context_hidden_states: Tensor, position_ids: Tensor, attention_mask: Tensor | None,
                cache: DynamicCache) -> BaseModelOutput:
        """noise_embeds [1, B, H]: the block's embeddings.  context_hidden_states [1, n, K*H]: taps of the n tokens before it,
        which the cache does not hold yet.  position_ids [1, n + B]: of both.  attention_mask: all ones for one text, not read.

        returns last_hidden_state [1, B, H], what the target's head reads.  The cache is n + B rows longer afterwards."""
        drafter, positions, slots = self.drafter, position_ids[0], noise_embeds.shape[1]
        cos, sin = rope_tables(positions, drafter.config.head_dim, drafter.config.rope_theta)
        before, own = (cos[:-slots], sin[:-slots]), (cos[-slots:], sin[-slots:])
        feature = drafter.hidden_norm(drafter.fc(context_hidden_states.to(drafter.fc.weight.dtype)))
        x, masks = noise_embeds.to(drafter.norm.weight.dtype), {}
        for index, (layer, rule) in enumerate(zip(drafter.layers, drafter.rules, strict=True)):
            new = layer.self_attn.keys_values(feature, before)

            def attended(q: Tensor, k: Tensor, v: Tensor, index: int = index, rule: tuple = rule, new: tuple = new) -> Tensor:
                k, v = cache.update(torch.cat([new[0], k], 2), torch.cat([new[1], v], 2), index)
                if rule not in masks:
                    masks[rule] = _mask(positions[-slots:], k.shape[2], *rule)
                return attend(q, k, v, masks[rule])
            x = layer(x, own, attended)
        return BaseModelOutput(last_hidden_state=drafter.norm(x))


def _mask(queries: Tensor, rows: int, causal: bool, window: int | None) -> Tensor | None:
    """queries [B]: the block's positions.  rows: keys shown, the last B of them the block's -> [B, rows] bool, None: all seen."""
    slots = len(queries)
    keys = queries[-1] + torch.arange(1 - rows, 1, device=queries.device)
    names = torch.full_like(keys, geometry.CONTEXT)
    names[-slots:] = queries[0]
    seen = geometry.visible(queries, names[-slots:], keys, names, causal, window)
    return None if seen.all() else seen
