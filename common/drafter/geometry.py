"""Where everything of a block stands: anchors, positions, labels, teachers, visibility.  Each convention once, here.

Same-position: row t of ids, mask, taps and final states is token t, and slot j of the block at anchor a has position
a+j and label ids[a+j] (pitfalls R1, R2, A4).  Pure functions on tensors of any device; batches of unequal length are
rows padded with a false loss mask, and anchors padded with PADDING."""
from __future__ import annotations

import torch
from torch import Tensor

from common.drafter.config import SLIDING, DrafterConfig

PADDING = -1          # an anchor that is none: its block sees itself only and carries no label
CONTEXT = -1          # the block name of context keys


def valid_anchors(loss_mask: Tensor) -> Tensor:
    """loss_mask (..., T) bool -> (..., T) bool: a may be an anchor.

    Its own token and the first it would draft are supervised (SpecForge's rule), and there is context before it."""
    valid = torch.zeros_like(loss_mask)
    valid[..., 1:-1] = loss_mask[..., 1:-1] & loss_mask[..., 2:]
    return valid


def draw_anchors(valid: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """valid (T,) bool -> (min(count, valid ones),) int64, ascending, without replacement."""
    places = valid.nonzero()[:, 0]
    chosen = torch.randperm(len(places), generator=generator, device=generator.device)[:count].to(places.device)
    return places[chosen].sort().values


def stack_anchors(anchors: list[Tensor]) -> Tensor:
    """Anchors of b sequences -> (b, most) int64, padded with PADDING."""
    return torch.nn.utils.rnn.pad_sequence(anchors, batch_first=True, padding_value=PADDING)


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """anchors (..., N) -> (..., N, B): slot j of the block at a stands at a+j."""
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)


def block_labels(ids: Tensor, loss_mask: Tensor, anchors: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """ids, loss_mask (..., T) and anchors (..., N) -> labels (..., N, B) int64, supervised (..., N, B) bool.

    Label of slot j is ids[a+j].  Slot 0 (known), slots past the text and unsupervised tokens carry no label: what
    stands in labels there has no meaning (slot 0 excepted, where it is the anchor's own token)."""
    positions = block_positions(anchors, block_size)
    inside = (anchors[..., None] >= 0) & (positions < ids.shape[-1])
    rows = positions.clamp(0, ids.shape[-1] - 1)
    supervised = inside & _take(loss_mask, rows)
    supervised[..., 0] = False
    return _take(ids, rows).long(), supervised


def block_inputs(ids: Tensor, anchors: Tensor, block_size: int, mask_token_id: int, masked: Tensor | None = None) -> Tensor:
    """-> (..., N, B) int64: the mask token in every masked slot, the text's own token in the others.

    masked (..., N, B) bool; None: all slots but slot 0, as a drafter meets them.  Slots that have no token (past the text,
    or of a block that is none) hold the mask token whatever `masked` says."""
    positions = block_positions(anchors, block_size)
    known = torch.arange(block_size, device=anchors.device) == 0 if masked is None else ~masked
    known = known & (anchors[..., None] >= 0) & (positions < ids.shape[-1])
    return torch.where(known, _take(ids, positions.clamp(0, ids.shape[-1] - 1)).long(), mask_token_id)


def teacher_rows(anchors: Tensor, block_size: int) -> Tensor:
    """-> (..., N, B): the row of final states whose distribution slot j learns, a+j-1.  In range where supervised."""
    return block_positions(anchors, block_size) - 1


def block_names(anchors: Tensor) -> Tensor:
    """anchors (..., N) -> (..., N) the name that `visible` knows each block by: its anchor; a padded one gets its own
    name below CONTEXT, so that it is its own world and no softmax row is empty."""
    index = torch.arange(anchors.shape[-1], device=anchors.device)
    return torch.where(anchors >= 0, anchors, CONTEXT - 1 - index)


def layout(anchors: Tensor, block_size: int, context: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """anchors (..., N) -> query positions and names (..., N*B), key positions and names (..., context + N*B).

    Queries are the blocks' slots in order; keys are context rows 0..context-1, then the same slots."""
    positions = block_positions(anchors, block_size).flatten(-2)
    names = block_names(anchors)[..., None].expand(*anchors.shape, block_size).flatten(-2)
    rows = torch.arange(context, device=anchors.device).expand(*anchors.shape[:-1], context)
    return positions, names, torch.cat([rows, positions], -1), torch.cat([torch.full_like(rows, CONTEXT), names], -1)


def visible(query_positions: Tensor, query_blocks: Tensor, key_positions: Tensor, key_blocks: Tensor,
            causal: bool, window: int | None) -> Tensor:
    """sees of each query and each key: query_positions, query_blocks (..., Q), key_positions, key_blocks (..., K) integers
    -> (..., Q, K) bool."""
    return sees(query_positions[..., :, None], query_blocks[..., :, None], key_positions[..., None, :], key_blocks[..., None, :], causal, window)


def sees(q: Tensor, anchor: Tensor, k: Tensor, block: Tensor, causal: bool, window: int | None) -> Tensor:
    """The one visibility rule (DESIGN convention 3): may the query see the key?  Integers that broadcast together -> bool.

    q, k positions; anchor the query's block and block the key's, blocks being named by their anchor (block_names); the key's is
    CONTEXT for a context row, which is seen strictly before the anchor.
    causal: no later slot of the own block; window W: distance below W, both ways where not causal."""
    seen = torch.where(block == CONTEXT, k < anchor, block == anchor)
    if causal:
        seen = seen & (k <= q)
    if window is not None:
        seen = seen & (q - k < window)
        if not causal:
            seen = seen & (k - q < window)
    return seen


def layer_rule(config: DrafterConfig, layer: int) -> tuple[bool, int | None]:
    """(causal in the block, window or None) of one layer; `mixed` is the released rule: sliding layers are causal."""
    sliding = config.layer_types[layer] == SLIDING
    causal = sliding if config.attention == "mixed" else config.attention == "causal"
    return causal, config.sliding_window if sliding else None


def _take(values: Tensor, rows: Tensor) -> Tensor:
    """values (..., T), rows (..., N, B) in range -> values at rows, (..., N, B)."""
    return values.gather(-1, rows.flatten(-2)).view(rows.shape)
