"""The Triton kernel of fused.py, which is the only file to import this one, and only when it is to run.

One program works on one row of logits, in two sweeps over the vocabulary: the first finds the largest logit and the sum of
exponentials as it goes (online softmax, Milakov and Gimelshein 1805.02867), the second writes the slope where the logit stood.
Everything is computed in fp32."""
from __future__ import annotations

import triton
import triton.language as tl

@triton.jit
def rows(logits, teacher, labels, loss, ce, hits, V, stride, KL: tl.constexpr, BLOCK: tl.constexpr):
    """logits (r, V) fp32, its rows `stride` apart: read, then overwritten by d loss / d logits; teacher as logits, where KL
    labels (r,) int64, below 0 where there is none;  loss, ce (r,) fp32;  hits (r,) int8: the first largest logit is the label's

    Offsets are 64 bits wide: a piece at V = 248320 has more than 2^31 bytes' worth of rows before its end."""
    row = tl.program_id(0).to(tl.int64)
    z, t = logits + row * stride, teacher + row * stride
    label = tl.load(labels + row)
    most, total = -3.0e38, 0.0                   # below every logit, and finite: a tile that is all -inf leaves it as it is
    first, most_t, total_t = 0, -3.0e38, 0.0
    for at in range(0, V, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(z + column, mask=column < V, other=-float("inf"))
        high, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        first = tl.where(high > most, at + place, first)                         # strictly: the lower index wins a tie
        new = tl.maximum(most, high)
        total = total * tl.exp(most - new) + tl.sum(tl.exp(x - new), 0)
        most = new
        if KL:
            y = tl.load(t + column, mask=column < V, other=-float("inf"))
            new_t = tl.maximum(most_t, tl.max(y, 0))
            total_t = total_t * tl.exp(most_t - new_t) + tl.sum(tl.exp(y - new_t), 0)
            most_t = new_t
    log_total, log_total_t = most + tl.log(total), most_t + tl.log(total_t)
    cross = log_total - tl.load(z + tl.maximum(label, 0))
    divergence = 0.0
    for at in range(0, V, BLOCK):
        column = at + tl.arange(0, BLOCK)
        log_q = tl.load(z + column, mask=column < V, other=-float("inf")) - log_total
        q = tl.exp(log_q)
        if KL:
            log_p = tl.load(t + column, mask=column < V, other=-float("inf")) - log_total_t
            p = tl.exp(log_p)
            divergence += tl.sum(tl.where(p > 0, p * (log_p - log_q), 0.0), 0)      # 0 log 0 is 0
            tl.store(z + column, q - p, mask=column < V)
        else:
            tl.store(z + column, q - (column == label).to(tl.float32), mask=column < V)
    known = label >= 0
    tl.store(ce + row, tl.where(known, cross, float("inf")))
    tl.store(loss + row, divergence if KL else tl.where(known, cross, 0.0))
    tl.store(hits + row, (first == label).to(tl.int8))
