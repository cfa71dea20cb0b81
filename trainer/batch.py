"""From stored samples to the tensors of one training step.

Captures are decoded here, and here each is checked once with the head that this box holds: the head on the final state
must give the token that the producer's head gave (pitfall L3: normed twice, or never; another head)."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.capture import Capture
from common.drafter import geometry
from common.drafter.config import DrafterConfig
from common.errors import CaptureError, CorruptError
from trainer import corruption
from trainer.arms import Arm
from trainer.config import CACHE_MB
from trainer.objectives import NEEDS_TEACHER

if TYPE_CHECKING:
    from trainer.inbox import Inbox

PROBE_MARGIN = 2 ** -6   # relative: two heads in different precision may swap tokens whose logits differ by less


@dataclass(frozen=True, eq=False)
class Batch:
    """b sequences padded to S rows, N anchors each, blocks of B slots."""

    taps: Tensor          # (b, S, K*H) bf16
    anchors: Tensor       # (b, N) int64, geometry.PADDING where a sequence had fewer
    inputs: Tensor        # (b, N, B) int64: the mask id in masked slots, the text's own token in the others, slot 0 among them
    labels: Tensor        # (b, N, B) int64
    supervised: Tensor    # (b, N, B) bool: masked slots only
    origin: Tensor        # (b, N) int64: slot that exp weights decay from (corruption.draw)
    finals: Tensor | None # (b, S, H) bf16 final states, row t of token t; None where the arm's loss has no teacher
    tokens: int           # rows of all sequences, padding not counted
    cut: int              # rows left out because a sequence was longer than the limit

    def to(self, device: torch.device) -> Batch:
        return Batch(**{k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in vars(self).items()})


def bf16(bits: np.ndarray) -> Tensor:
    """bf16 bits in uint16 -> torch.bfloat16, no copy."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def concat_taps(taps: np.ndarray) -> Tensor:
    """(K, T, H) uint16 -> (T, K*H) bf16: row t holds token t's taps side by side in the order listed, as fc reads them."""
    return bf16(np.ascontiguousarray(taps.transpose(1, 0, 2))).flatten(1)


def make_batch(captures: list[Capture], config: DrafterConfig, arm: Arm, *, anchors: int, max_tokens: int,
               generators: Sequence[torch.Generator]) -> Batch:
    """generators (CPU), one for each capture: up to `anchors` anchors are drawn from it without replacement, then what is masked.
    So arms of one seed train at the same anchors, whatever they mask and minimise, and a sequence in the same way, whatever else
    is in its batch."""
    block, lengths = config.block_size, [min(c.tokens, max_tokens) for c in captures]
    drawn, masks, origins = [], [], []
    for capture, length, generator in zip(captures, lengths, generators, strict=True):
        valid = geometry.valid_anchors(torch.from_numpy(capture.loss_mask[:length]))
        drawn.append(geometry.draw_anchors(valid, anchors, generator))
        masks_of, origins_of = corruption.draw(arm.corruption, len(drawn[-1]), block, generator)
        masks.append(masks_of)
        origins.append(origins_of)
    where = geometry.stack_anchors([*drawn, torch.tensor([geometry.PADDING])])[:-1]        # at least one block, if only padding
    masked = torch.ones(*where.shape, block, dtype=torch.bool)                             # a padded block holds nothing but masks
    origin = torch.ones_like(where)
    for i, (masks_of, origins_of) in enumerate(zip(masks, origins)):
        masked[i, :len(masks_of)], origin[i, :len(origins_of)] = masks_of, origins_of
    taps = torch.zeros(len(captures), max(lengths), len(config.taps) * config.hidden_size, dtype=torch.bfloat16)
    finals = torch.zeros(len(captures), max(lengths), config.hidden_size, dtype=torch.bfloat16) if arm.loss in NEEDS_TEACHER else None
    inputs, labels, supervised = [], [], []
    for i, (capture, length) in enumerate(zip(captures, lengths)):
        taps[i, :length] = concat_taps(capture.taps[:, :length])
        if finals is not None:
            finals[i, :length] = bf16(capture.final[:length])
        ids = torch.from_numpy(capture.ids[:length]).long()
        mask = torch.from_numpy(capture.loss_mask[:length])
        inputs.append(geometry.block_inputs(ids, where[i], block, config.mask_token_id, masked[i]))
        label, keep = geometry.block_labels(ids, mask, where[i], block)
        labels.append(label)
        supervised.append(keep & masked[i])
    return Batch(taps=taps, anchors=where, inputs=torch.stack(inputs), labels=torch.stack(labels), supervised=torch.stack(supervised),
                 origin=origin, finals=finals, tokens=sum(lengths), cut=sum(c.tokens for c in captures) - sum(lengths))


def check_probes(capture: Capture, head: Tensor) -> None:
    """head (V, H).  Raises CaptureError naming the first row where this box's head disagrees with the producer's, or for a token that
    the target does not have."""
    rows, tokens = capture.probe_rows, np.concatenate([capture.ids, capture.probe_tokens])
    if tokens.min() < 0 or tokens.max() >= len(head):
        raise CaptureError(f"token ids run from {tokens.min()} to {tokens.max()}, the target has {len(head)}")
    logits = bf16(capture.final[rows]).to(head.device, torch.float32) @ head.float().T if len(rows) else torch.zeros(0, 1)
    for row, token, values in zip(rows.tolist(), capture.probe_tokens.tolist(), logits):
        best = values.max()
        if best - values[token] > PROBE_MARGIN * best.abs():
            raise CaptureError(f"row {row}: lm_head on the final state gives token {int(values.argmax())}, the producer's gave "
                               f"{token}; the final state or the head is not what the contract says")


class Samples:
    """Decoded captures of this box's store, those used last kept in memory, `keep_bytes` of them; index 0 is the store's first sample."""

    def __init__(self, inbox: Inbox, head: Tensor, *, contract: str, mask_token_id: int, most: int | None = None,
                 keep_bytes: int = CACHE_MB << 20) -> None:
        """inbox: whoever has `store`, the SampleStore in use (a follower that takes over opens another), and `mend`.  most: samples that there are,
        whatever comes after them; None: all."""
        self._inbox, self._head, self._contract, self._mask, self._most = inbox, head, contract, mask_token_id, most
        self._kept: OrderedDict[int, Capture] = OrderedDict()
        self._held, self._keep = 0, keep_bytes
        self._checked: set[int] = set()

    def __len__(self) -> int:
        here = self._inbox.store.next - self._inbox.store.first
        return here if self._most is None else min(here, self._most)

    def text(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (T,) int32 and loss_mask (T,) bool of a sample, without its states."""
        if index in self._kept:
            return self._kept[index].ids, self._kept[index].loss_mask
        store = self._inbox.store
        return self._whole(store.first + index, store.text)

    def __getitem__(self, index: int) -> Capture:
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        store = self._inbox.store
        seq = store.first + index
        sample = self._whole(seq, store.sample)
        if sample.contract != self._contract:
            raise CaptureError(f"sample {seq} was captured under another contract ({sample.contract[:12]})")
        if index not in self._checked:
            try:
                if (sample.capture.ids == self._mask).any():
                    raise CaptureError(f"the mask token {self._mask} is in its text")
                check_probes(sample.capture, self._head)
            except CaptureError as error:
                raise CaptureError(f"sample {seq}: {error}") from None
            self._checked.add(index)
        self._kept[index] = sample.capture
        self._held += _bytes(sample.capture)
        while self._held > self._keep and len(self._kept) > 1:
            self._held -= _bytes(self._kept.popitem(last=False)[1])
        return sample.capture


    def _whole(self, seq: int, read: Callable[[int], Any]) -> Any:
        """read(seq); a sample that is damaged is mended first (Inbox.mend), or that raises UserError."""
        try:
            return read(seq)
        except CorruptError as error:
            self._inbox.mend(seq, error)
        return read(seq)


def _bytes(capture: Capture) -> int:
    return sum(value.nbytes for value in vars(capture).values() if isinstance(value, np.ndarray))


def load_weights(assets: dict[str, Path], device: torch.device) -> tuple[Tensor, Tensor]:
    """embedding, head (V, H) on the device, bf16 on a GPU and fp32 on a CPU; one tensor where no lm_head is offered (tied)."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    embedding, head = (load_file(assets[name])["weight"].to(device, dtype) if name in assets else None for name in ("embedding", "lm_head"))
    return embedding, embedding if head is None else head
