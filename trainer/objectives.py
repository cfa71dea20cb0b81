"""What a run minimises: a loss per supervised slot and a weight per slot, summed as sum(w m loss) / sum(w m).

Pure functions of tensors, the definitions.  q = softmax(logits) is the drafter's distribution for a slot, p = softmax(teacher
logits) the target's own for the same token: its head on the final state of row a+j-1 (geometry.teacher_rows), both at
temperature 1 and over the same tokens, all of the vocabulary or the list that may be drafted.  trainer/gradients.py has
the same losses with their gradients written out, which is what training runs.

The denominator is part of the definition (peers differ by 3-15x there, and learning rates do not carry over); `DENOMINATOR`
goes into every run's record.  speculators divides D-PACE's sum by sum(m) instead, SpecForge by the batch."""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from common.drafter.vocab import OUTSIDE      # the label of a token that is not in the list that may be drafted

DENOMINATOR = "sum(w m loss) / sum(w m)"
LK_SLOPE = 3.0               # lk_hybrid's: how soon KL gives way as the distributions come to overlap

Loss = Callable[[Tensor, Tensor | None, Tensor], Tensor]
# logits (R, V) any float, teacher logits (R, V) or None, labels (R,) int64: places among the V -> loss (R,) float32


def ce(logits: Tensor, _teacher: Tensor | None, labels: Tensor) -> Tensor:
    """-log q[label]: cross entropy against the data's own token (DFlash, SpecForge).  0 where the label is OUTSIDE."""
    return F.cross_entropy(logits.float(), labels, reduction="none", ignore_index=OUTSIDE)


def ce_argmax(logits: Tensor, teacher: Tensor, _labels: Tensor) -> Tensor:
    """-log q[argmax p]: cross entropy against the target's first choice (speculators' `ce`)."""
    return F.cross_entropy(logits.float(), teacher.argmax(-1), reduction="none")


def kl(logits: Tensor, teacher: Tensor, _labels: Tensor) -> Tensor:
    """KL(p || q) = sum p (log p - log q): forward, exact over every token (JetSpec 2606.18394; speculators' `kl_div`)."""
    log_p, log_q = teacher.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def rkl(logits: Tensor, teacher: Tensor, _labels: Tensor) -> Tensor:
    """KL(q || p) = sum q (log q - log p): reverse, prefers q on few tokens that p likes."""
    log_p, log_q = teacher.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def tv(logits: Tensor, teacher: Tensor, _labels: Tensor) -> Tensor:
    """1 - sum min(p, q): total variation, the probability that a drawn draft is rejected (Leviathan et al. 2211.17192)."""
    return 1 - torch.minimum(teacher.float().softmax(-1), logits.float().softmax(-1)).sum(-1)


def lk_hybrid(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """lam KL(p || q) + (1 - lam) TV, lam = exp(-3 sum min(p, q)) detached (speculators' `lk_hybrid`)."""
    variation = tv(logits, teacher, labels)
    share = torch.exp(-LK_SLOPE * (1 - variation)).detach()
    return share * kl(logits, teacher, labels) + (1 - share) * variation


LOSSES: dict[str, Loss] = {"ce": ce, "ce_argmax": ce_argmax, "kl": kl, "rkl": rkl, "tv": tv, "lk_hybrid": lk_hybrid}
NEEDS_LABEL = frozenset({"ce"})                      # a slot whose label is OUTSIDE has nothing to learn from
NEEDS_TEACHER = frozenset(LOSSES) - NEEDS_LABEL


def gamma_for(block_size: int) -> float:
    """The paper's decay by block size: 7 for 16, 5 for 10, 4 for 8 (DFlash, section on training); 1 + 3B/8 meets all three."""
    return float(round(1 + 3 * block_size / 8))


def slot_weights(kind: str, slots: Tensor, origin: Tensor, gamma: float) -> Tensor:
    """slots, origin (R,) int64 -> (R,) float32: what each supervised slot weighs before its block is looked at.

    exp: exp(-(j - l) / gamma), l the origin: 1, or the first masked slot of a variable prefix (D2SD).  uniform: 1 (JetSpec).
    dpace: 1; its weights come from the losses themselves."""
    if kind == "exp":
        return torch.exp((origin - slots) / gamma)
    if kind in ("uniform", "dpace"):
        return torch.ones(slots.shape, device=slots.device)
    raise ValueError(f"weights {kind!r}")


def dpace(ce_of: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE (speculators' default for DFlash): weights of one block's slots, from how far the drafter now gets in it.

    ce_of (..., B) float: -log q[label] of each slot, inf where the label is OUTSIDE (a certain rejection); supervised (..., B) bool
    returns (..., B) float32, detached:  q_j = exp(-ce_j);  s_j = (1 - alpha) q_j + alpha where m_j, else 1;
    P_j = prod_{i <= j} s_i;  w_j = m_j sum_{i >= j} P_i m_i: what is still to be gained from slot j on."""
    sure = torch.where(supervised, (1 - alpha) * torch.exp(-ce_of.detach().float()) + alpha, 1.0)
    reached = sure.cumprod(-1) * supervised
    return reached.flip(-1).cumsum(-1).flip(-1) * supervised
