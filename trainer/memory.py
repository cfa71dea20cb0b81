"""`hstrain memory`: what one training step needs, by part, before anything is loaded.  Arithmetic alone; no torch here.

Counted is what the code keeps: common/drafter (what autograd saves of each layer; a test counts the same storages in a real
layer), trainer/head.py (pieces), trainer/optim.py.  The peak is the worst of five moments (`moments`): parts that never meet are not added.
benchmarks/memory.py holds it against measured steps.

Left out: holes in an allocator and a card's context (RESERVE), and a kernel's own workspace.

On a GPU a step is autocast to bf16, on a CPU all is fp32; a CPU under autocast (benchmarks/full_step.py) is the third kind of Job."""
from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.drafter.config import SLIDING, DrafterConfig, shape_for
from common.errors import UserError
from trainer.arms import Arm

GIB = 1 << 30
RESERVE = 1.5                # GiB of a card that are not ours: its context, the allocator's holes, a screen
LOADED = 166 << 20           # a CPU process beside its tensors: what torch loads with the first step (163 to 169 MiB on four shapes, x86)
PIECE = 256 << 20            # head.PIECE_BYTES
RECOMPUTE = 2 << 30          # model.MOST_SAVED
SAVED = 54                   # model.SAVED
GROUP = 256                  # attention.GROUP
TEACHERS = frozenset({"ce_argmax", "kl", "rkl", "tv", "lk_hybrid"})      # objectives.NEEDS_TEACHER
STEP = 16                    # anchors, and STEP * 16 tokens, that suggestions are rounded down to
FROZEN, MASTERS, STATE, CAST, BATCH, CONTEXT, BLOCKS, MASKS, LOSS, GRADIENTS, TORCH = PARTS = (
    "embedding and output head, frozen", "drafter, fp32", "optimiser's state", "weights cast for the step", "batch: taps, final states",
    "context, for the backward", "blocks, for the backward", "masks", "loss: logits in pieces, gradient of the states", "gradients",
    "torch itself, after its first step")


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
    bf16: bool | None = None         # under autocast, embedding and head bf16; None: on a GPU

    @property
    def wide(self) -> int:
        """Bytes of a number where autocast decides."""
        return 2 if (self.gpu if self.bf16 is None else self.bf16) else 4

    @property
    def normed(self) -> int:
        """Bytes that a norm keeps of a number: its input in fp32, and on a CPU, where torch composes it, that divided by its size."""
        return 4 if self.gpu else 8

    @property
    def slots(self) -> int:
        return self.sequences * self.anchors * self.config.block_size

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens

    @property
    def supervised(self) -> int:
        return self.sequences * self.anchors * (self.config.block_size - 1)

    @property
    def recomputes(self) -> bool:
        return self.config.num_hidden_layers * self.slots * self.config.hidden_size * SAVED > RECOMPUTE


def parameters(config: DrafterConfig) -> tuple[int, int]:
    """Numbers in matrices, and in norms."""
    h = config.hidden_size
    return len(config.taps) * h * h + config.num_hidden_layers * layer_matrices(config), \
        2 * h + config.num_hidden_layers * (2 * h + 2 * config.head_dim)


def layer_matrices(config: DrafterConfig) -> int:
    q, k = widths(config)
    return 2 * config.hidden_size * (q + k) + 3 * config.hidden_size * config.intermediate_size


def widths(config: DrafterConfig) -> tuple[int, int]:
    """Of a row's queries, and of its keys or values."""
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


def parts(job: Job) -> dict[str, int]:
    """Bytes by part (PARTS); what each is stands in its name.  Not all are there at one time: peak."""
    c, (matrices, norms), layers = job.config, parameters(job.config), layer_bytes(job)
    h, count = c.hidden_size, matrices + norms
    inputs = c.num_hidden_layers * 4 * h * job.slots
    return {
        FROZEN: (c.vocab_size + (0 if job.tied and job.head == c.vocab_size else job.head)) * h * job.wide,
        MASTERS: 4 * count,
        STATE: 8 * count if job.optimizer == "adamw" else 4 * matrices + 8 * norms,
        CAST: 2 * matrices if job.wide == 2 else 0,
        BATCH: job.rows * h * 2 * (len(c.taps) + (job.loss in TEACHERS)),
        CONTEXT: context_bytes(job),
        BLOCKS: (inputs + max(layers) if job.recomputes else sum(layers)) + tail_bytes(job),
        MASKS: mask_bytes(job),
        LOSS: loss_bytes(job),
        GRADIENTS: 4 * count,
        TORCH: 0 if job.gpu else LOADED}


def moments(job: Job) -> dict[str, int]:
    """Bytes at the five moments of which one is the worst.

    The loss has all that the backward will read, and no gradients.  The backward goes from the last layer to the first: what a layer
    kept goes and its gradients come, so among layers it is at its worst at one of its two ends; then it ends in the context.  The
    optimiser has the gradients and what it works with."""
    c, found, wide = job.config, parts(job), job.wide
    (_, k), layer, h, depth = widths(c), layer_matrices(c), c.hidden_size, c.num_hidden_layers
    lasting = sum(found[name] for name in (FROZEN, MASTERS, STATE, BATCH, TORCH))
    layers, cast, loss = layer_bytes(job), found[CAST], found[BLOCKS]
    first, last = layers[0], sum(layers)
    few = 2 * (depth * 2 * h * k + layer) if wide == 2 else 0                        # casts live as long as what was computed with them
    if job.recomputes:
        stream = 4 * h * job.slots
        first, last, cast, loss = first + stream, depth * stream + layers[-1], few, loss - max(layers)
    working = 2 * job.slots * (c.intermediate_size * wide + 4 * h) + 4 * h * c.intermediate_size       # of one layer's backward: MLP and stream
    turning = 2 * wide * k * job.rows * depth                                         # gradients of the context's keys and values
    taps = 4 * len(c.taps) * h * job.rows if wide == 4 else 0
    return {
        "loss": lasting + found[CAST] + found[CONTEXT] + loss + found[MASKS] + found[LOSS],
        "backward, last layer": lasting + cast + found[CONTEXT] + last + found[MASKS] + working,
        "backward, first layer": lasting + few + found[CONTEXT] + first + found[MASKS] + working + turning + 4 * layer * (depth - 1),
        "backward, context": lasting + taps + found[GRADIENTS] + 2 * wide * h * job.rows,
        "optimiser": lasting + found[GRADIENTS] + optimiser_bytes(job)}


def peak(job: Job) -> int:
    """Bytes at the worst moment."""
    return max(moments(job).values())


def optimiser_bytes(job: Job) -> int:
    """What a step of it works with: torch's foreach form, a GPU's, makes one copy of all; else some of the largest matrix."""
    c, (matrices, norms) = job.config, parameters(job.config)
    largest = max(len(c.taps) * c.hidden_size, widths(c)[0], c.intermediate_size) * c.hidden_size
    if job.optimizer == "muon":                              # update and its bf16 iterates, a matrix at a time
        return 12 * largest
    return 4 * (matrices + norms) if job.gpu else 8 * largest


def kept(job: Job) -> dict[str, int]:
    """Bytes that a layer keeps of one slot for the backward, keys and values and their mask apart.

    Under autocast each of q, k, v, gate and up casts its input for itself; in fp32 they share one.  A CPU's groups are joined to one
    tensor for o_proj; flex's output is read as it is."""
    c, wide = job.config, job.wide
    h, (q, k) = c.hidden_size, widths(c)
    return {
        "norms of the stream": 2 * job.normed * h,
        "norms of queries and keys": job.normed * (q + k),
        "sizes of what was normed": 4 * (2 + c.num_attention_heads + c.num_key_value_heads),
        "inputs of q, k, v, gate, up": (5 if wide == 2 else 2) * wide * h,
        "queries, turned": wide * q,
        "attention's output and its sum": wide * q + 4 * c.num_attention_heads,
        "input of o_proj": 0 if job.gpu or len(_groups(job)) == 1 else wide * q,
        "gate, its silu, up, their product": 4 * wide * c.intermediate_size}


def layer_bytes(job: Job) -> list[int]:
    """What each layer keeps: `kept` of its slots, and keys and values as attention read them.

    Those are one copy for all blocks of a sequence, or one for each group of them, which sees the text up to its last anchor."""
    slots = job.slots * sum(kept(job).values())
    both = 2 * job.wide * widths(job.config)[1]
    return [slots + both * (job.rows + job.slots if job.gpu else job.sequences * sum(_seen(job, *group, kind) for group in _groups(job)))
            for kind in job.config.layer_types]


def mask_bytes(job: Job) -> int:
    """A CPU's: a byte for each of a group's slots and keys under each rule, and those again as numbers in each layer that is kept.
    A GPU's masks are tiles'."""
    if job.gpu:
        return 2 * math.ceil(job.slots / 128) * math.ceil((job.rows + job.slots) / 128) * 8
    kinds, size = job.config.layer_types, job.config.block_size
    of = {kind: job.sequences * sum((last - first) * size * _seen(job, first, last, kind) for first, last in _groups(job)) for kind in set(kinds)}
    return sum(of.values()) + job.wide * (max(of.values()) if job.recomputes else sum(of[kind] for kind in kinds))


def _groups(job: Job) -> list[tuple[int, int]]:
    blocks = max(1, GROUP // job.config.block_size)
    return [(first, min(first + blocks, job.anchors)) for first in range(0, job.anchors, blocks)]


def _seen(job: Job, first: int, last: int, kind: str) -> int:
    """Keys of the group of blocks first..last in a layer of that kind, anchors evenly spread (attention.seen_rows)."""
    end, begin = job.tokens * last // job.anchors, 0
    if kind == SLIDING:
        begin = max(0, job.tokens * first // job.anchors - job.config.sliding_window + 1)
    return end - begin + (last - first) * job.config.block_size


def context_bytes(job: Job) -> int:
    """Of the text's rows: taps in fp32 where nothing casts them, the feature and its norm, each layer's keys and their norm, angles; and,
    where layers are run again, keys and values as they were, which else live on in attention's copies alone."""
    c, layers = job.config, job.config.num_hidden_layers
    h, (_, k) = c.hidden_size, widths(c)
    row = (job.normed + job.wide) * h + layers * job.normed * k + 4 * (1 + layers * c.num_key_value_heads) + 4 * c.head_dim
    if job.wide == 4:
        row += 4 * len(c.taps) * h
    if job.recomputes:
        row += 2 * job.wide * k * layers
    return job.rows * row


def tail_bytes(job: Job) -> int:
    """Of the slots, beside the layers: the last norm, what it gives, and angles."""
    return job.slots * ((job.normed + 4) * job.config.hidden_size + 4 * job.config.head_dim)


def loss_bytes(job: Job) -> int:
    """A piece's fp32 arrays, and for each supervised slot its state, that one's gradient, and the teacher's final state.

    Whole pieces (a GPU): the logits and one array more; with a teacher, its logits, those once more a slot, and a third.  In tiles (a CPU):
    the logits, half as much where products are bf16, and the teacher's of a piece's distinct tokens."""
    rows = min(job.supervised, max(job.config.block_size - 1, PIECE // (4 * job.head)))
    piece, teacher = 4 * rows * job.head, job.loss in TEACHERS
    if job.gpu:
        copies = 4.25 if teacher else 2
    else:
        copies = (1.5 if job.wide == 2 else 1) + teacher * min(1, job.rows / job.supervised)
    return int(copies * piece) + job.supervised * job.config.hidden_size * (8 + 2 * teacher)


def largest(fits: Callable[[int], bool], step: int, most: int) -> int:
    """The largest multiple of step up to most for which fits(it); 0 where none does.

    Each is tried, from the top: where layers begin to be run again, more anchors need less."""
    return next((n for n in range(most // step * step, 0, -step) if fits(n)), 0)


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
