"""`hstrain memory`: what one training step needs, by part, before anything is loaded.  Arithmetic alone; no torch here.

Counted is what the code keeps: common/drafter (what autograd saves of each layer), trainer/head.py (pieces), trainer/optim.py.
The peak is the largest of three moments: the loss (all activations, no gradients yet), the backward (gradients, and what one
layer needs at once), the optimiser (gradients and what it works with).  benchmarks/memory.py holds it against measured steps.

On a GPU a step is autocast to bf16 (wide = 2); on a CPU all is fp32 (wide = 4)."""
from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from common.drafter.config import DrafterConfig, shape_for
from common.errors import UserError
from trainer.arms import Arm

GIB = 1 << 30
RESERVE = 1.5                # GiB of a card that are not ours: its context, the allocator's holes, a screen
PIECE = 256 << 20            # head.PIECE_BYTES
RECOMPUTE = 2 << 30          # model.MOST_SAVED
SAVED = 54                   # model.SAVED
GROUP = 256                  # attention.GROUP
TEACHERS = frozenset({"ce_argmax", "kl", "rkl", "tv", "lk_hybrid"})      # objectives.NEEDS_TEACHER
STEP = 16                    # anchors, and STEP * 16 tokens, that suggestions are rounded down to


@dataclass(frozen=True)
class Job:
    """A step on one device: sequences of `tokens` tokens each, `anchors` blocks in each."""

    config: DrafterConfig
    loss: str
    sequences: int
    anchors: int
    tokens: int
    optimizer: str
    head: int                        # rows of the head: all of the vocabulary, or the list that may be drafted
    gpu: bool = True
    tied: bool = False               # embedding and head are one tensor

    @property
    def slots(self) -> int:
        return self.sequences * self.anchors * self.config.block_size

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens

    @property
    def recomputes(self) -> bool:
        return self.config.num_hidden_layers * self.slots * self.config.hidden_size * SAVED > RECOMPUTE


def parameters(config: DrafterConfig) -> tuple[int, int]:
    """Numbers in matrices, and in norms."""
    h, d, i = config.hidden_size, config.head_dim, config.intermediate_size
    q, k = config.num_attention_heads * d, config.num_key_value_heads * d
    layer = 2 * h * q + 2 * h * k + 3 * h * i
    return len(config.taps) * h * h + config.num_hidden_layers * layer, 2 * h + config.num_hidden_layers * (2 * h + 2 * d)


def parts(job: Job) -> dict[str, int]:
    """Bytes by part; what each is stands in its name."""
    c, wide = job.config, 2 if job.gpu else 4
    matrices, norms = parameters(c)
    count, h = matrices + norms, c.hidden_size
    kept = {
        "embedding and output head, frozen": (c.vocab_size + (0 if job.tied and job.head == c.vocab_size else job.head)) * h * wide,
        "drafter, fp32": 4 * count,
        "optimiser's state": 8 * count if job.optimizer == "adamw" else 4 * matrices + 8 * norms,
        "weights cast for the step": 2 * matrices if job.gpu else 0,
        "batch: taps, final states": job.rows * h * 2 * (len(c.taps) + (job.loss in TEACHERS)),
    }
    once = layer_bytes(job)
    kept["context, for the backward"] = context_bytes(job)
    kept["blocks, for the backward"] = (c.num_hidden_layers * 4 * h * job.slots + once if job.recomputes else c.num_hidden_layers * once) \
        + (3 * 4 + wide) * h * job.slots
    kept["masks"] = mask_bytes(job)
    kept["loss: logits in pieces, gradient of the states"] = loss_bytes(job)
    kept["gradients"] = 4 * count
    return kept


def peak(job: Job) -> int:
    """Bytes at the worst of the three moments."""
    found = parts(job)
    lasting = sum(found[name] for name in ("embedding and output head, frozen", "drafter, fp32", "optimiser's state", "batch: taps, final states"))
    activations = sum(found[name] for name in ("weights cast for the step", "context, for the backward", "blocks, for the backward", "masks"))
    matrices, norms = parameters(job.config)
    backward = found["gradients"] + 2 * job.slots * job.config.intermediate_size * (2 if job.gpu else 4)
    return lasting + max(activations + found["loss: logits in pieces, gradient of the states"],
                         activations + backward + 4 * job.slots * job.config.hidden_size,
                         found["gradients"] + (4 * (matrices + norms) if job.gpu else 0))       # torch's foreach form makes one copy


def layer_bytes(job: Job) -> int:
    """What one layer keeps of its slots: two norms' inputs and outputs, queries and keys before and after norm and turn, attention's
    output twice (as it comes, and as o_proj reads it), and four of the MLP's width."""
    c, wide = job.config, 2 if job.gpu else 4
    q, k = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    slot = 2 * (4 + wide) * c.hidden_size + (4 + 2 * wide) * (q + k) + wide * k + 2 * wide * q + 4 * wide * c.intermediate_size
    return job.slots * slot + 2 * wide * k * keys(job)


def keys(job: Job) -> int:
    """Rows of keys that attention keeps, context and own: one copy for all blocks of a sequence, or one for each group of them, which
    sees the text up to its last anchor: about half of it."""
    if job.gpu:
        return job.rows + job.slots
    return job.sequences * sum(_seen(job, first, last) for first, last in _groups(job))


def mask_bytes(job: Job) -> int:
    """A CPU's: a byte for each of a group's slots and keys, and four once more while attention reads it.  A GPU's masks are tiles'."""
    if job.gpu:
        return 2 * math.ceil(job.slots / 128) * math.ceil((job.rows + job.slots) / 128) * 8
    rules = len({(kind, job.config.attention) for kind in job.config.layer_types})
    size = job.config.block_size
    return sum((last - first) * size * _seen(job, first, last) for first, last in _groups(job)) * job.sequences * (rules + 4 * job.config.num_hidden_layers)


def _groups(job: Job) -> list[tuple[int, int]]:
    blocks = max(1, GROUP // job.config.block_size)
    return [(first, min(first + blocks, job.anchors)) for first in range(0, job.anchors, blocks)]


def _seen(job: Job, first: int, last: int) -> int:
    """Keys of the group of blocks first..last, anchors evenly spread."""
    return int(job.tokens * last / job.anchors) + (last - first) * job.config.block_size


def context_bytes(job: Job) -> int:
    c, wide = job.config, 2 if job.gpu else 4
    k = c.num_key_value_heads * c.head_dim
    taps = 0 if job.gpu else job.rows * len(c.taps) * c.hidden_size * 4        # cast to fp32 on a CPU
    return taps + job.rows * ((4 + 2 * wide) * c.hidden_size + c.num_hidden_layers * ((4 + 2 * wide) * k + wide * k))


def loss_bytes(job: Job) -> int:
    supervised = job.slots * (job.config.block_size - 1) // job.config.block_size
    piece = min(PIECE, supervised * job.head * 4)
    copies = (3 if job.gpu else 2) if job.loss in TEACHERS else 1.5
    return int(copies * piece) + 2 * supervised * job.config.hidden_size * 4


def largest(fits, step: int, most: int) -> int:
    """The largest multiple of step up to most for which fits(it); 0 where none does.  fits: true below some number, false above."""
    low, high = 0, most // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
    return low * step


def shape_of(path: Path) -> dict:
    """hidden, layers, vocab, tied of a target's config.json, or of the folder that holds it.  UserError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        whole = json.loads(file.read_text())
        text = whole.get("text_config", whole)
        return {"hidden": int(text["hidden_size"]), "layers": int(text["num_hidden_layers"]), "vocab": int(text["vocab_size"]),
                "tied": bool(whole.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))}
    except OSError as error:
        raise UserError(f"--target-config {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--target-config {path}: no target's config.json ({error!r})") from None


def drafter_for(hidden: int, layers: int, vocab: int, taps: int, arm: Arm, **over) -> DrafterConfig:
    if not 1 <= taps <= layers:
        raise UserError(f"--taps {taps}: from 1 to the target's {layers} layers")
    return shape_for(hidden, vocab, layers, tuple(range(taps)), vocab - 1, arm.attention, all_sliding=arm.all_sliding,
                     **{name: value for name, value in over.items() if value is not None})
