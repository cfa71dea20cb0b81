"""Is this target, on this machine and these library versions, one whose blocks can be verified and rolled back?  Seconds, at start.

The tests of this repository hold that on a CPU and one version of transformers; a GPU's kernels, another version or another
checkpoint may break it, and every acceptance figure and every lossless claim with it.  So a few forwards of fixed tokens
measure it on the loaded target (`measure`), and `judge` holds the numbers against bounds, each with its reason:

    forward   the whole text at once against one token at a time: the target's own noise between shapes of one forward.
              Rounding stays a small share of the logits; a one-token kernel of another mind does not (R5).
    block     a verified block against single steps: at most four times that noise, for it is the same kind of difference.
              A multi-token forward that forgets the cached state shows here (S2).
    taps      the same of the hidden states, as a share of each tap's largest value.
    held      a verify alone changes no bit of a linear layer's state: exact, on every device.
    crop      an attention layer keeps exactly the rows it had: exact.
    suffix    two blocks, alike as far as they are kept: equal states and next logits.  Exact on a CPU, with experts one by one
              (in grouped kernels the other tokens change a group's size, and so its rounding); elsewhere within the
              share of `forward`, for no GPU library promises that a row does not depend on the others.
    fold      the fast rollback against its plain twin, replay, which projects the kept tokens anew: rounding.
    after     what follows a rollback against single steps: as block.

Medians over rows where rounding is allowed: an expert chosen otherwise at a near tie moves one row by a thousand times the
rounding (seen in fp32); a wrong state moves all of them.  Left out: sampling, the drafter, speed.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import UserError
from producer.experts import TEXT
from producer.rollback import TargetCache
from producer.target import Target

PROMPT, BLOCK, KEPT = 37, 16, 5          # tokens; 37: no multiple of the chunks in which kernels work
# Shares of the largest logit.  Measured 3e-7 to 1e-6 (fp32) and 5e-3 to 7e-3 (bf16); ten times that and more, for deeper models
OWN_NOISE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
# Shares of a state's largest value: a few steps of the dtype.  Measured 1e-7 to 3e-7; a fold off by one token gives 0.5 and more
STATE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Measured:
    """What `measure` saw.  Differences of logits are in logits, of states and taps in shares of their tensor's largest value."""

    dtype: torch.dtype
    exact: bool                          # rows cannot feel each other: a CPU, no experts or experts one by one
    largest: float                       # |logit|
    noise: float                         # logits, median row: whole text against single steps
    block: float                         # logits, median row: block against single steps
    block_largest: float                 # logits, worst row
    disagreed: int                       # of BLOCK rows: another first token than the single step's, where that stood clear of rounding
    taps: float                          # median row of the worst tap: block against single steps
    held: bool                           # a verify left linear states as they were, bit for bit; of blocks of BLOCK and of 1
    crop: bool                           # attention rows after a commit are the rows before it, and as many as were kept
    suffix: float                        # worst of states and next logits
    fold: float | None                   # worst state; None on a dense target
    after: float                         # logits, median row: what follows a rollback against single steps


@dataclass(frozen=True)
class Check:
    """error <= bound, or the target is not served.  A number that is none fails."""

    name: str
    error: float
    bound: float
    wrong: str                           # what it means if it fails

    @property
    def failed(self) -> bool:
        return not self.error <= self.bound


@dataclass(frozen=True)
class SelfTest:
    measured: Measured
    checks: tuple[Check, ...]
    seconds: float

    def line(self) -> str:
        m = self.measured
        fold = "" if m.fold is None else f", fold = replay within {m.fold:.1g}"
        suffix = "suffix leaves no trace" if m.suffix == 0 else f"suffix leaves {m.suffix:.1g} (rounding)"
        return (f"self-test: block = steps within {m.block_largest:.1g} (own noise {m.noise:.1g}, largest logit {m.largest:.0f}), "
                f"{suffix}{fold}, {self.seconds:.1f} s")

    def require(self, name: str) -> None:
        """UserError naming every check that failed, the most telling first."""
        if failed := [check for check in self.checks if check.failed]:
            says = "; ".join(f"{c.name}: {c.wrong} ({c.error:.2g}, at most {c.bound:.2g})" for c in failed)
            raise UserError(f"{name} fails the self-test, so it is not served: {says}. Use the versions that pyproject.toml names, "
                            "or another target")


def judge(m: Measured) -> tuple[Check, ...]:
    """Numbers -> verdicts.  Pure."""
    rounding = 4 * max(m.noise, torch.finfo(m.dtype).eps * m.largest)       # one step of the dtype: noise may happen to be nil
    checks = [
        Check("forward", m.noise / m.largest, OWN_NOISE[m.dtype], "one token at a time gives other logits than the whole text"),
        Check("block", m.block, rounding, "a verified block gives other logits than single steps"),
        Check("block", m.disagreed, BLOCK // 8, "a verified block chooses other tokens than single steps, against clear margins"),
        Check("taps", m.taps, OWN_NOISE[m.dtype], "a verified block gives other hidden states than single steps"),
        Check("held", 0.0 if m.held else 1.0, 0.0, "a verify changes the state before it is committed"),
        Check("crop", 0.0 if m.crop else 1.0, 0.0, "an attention layer does not keep exactly the accepted rows"),
        Check("fold", 0.0 if m.fold is None else m.fold, STATE[m.dtype], "the fast rollback is not the layers' own"),
        Check("suffix", m.suffix, 0.0 if m.exact else OWN_NOISE[m.dtype], "rejected tokens leave a trace"),
        Check("after", m.after, rounding, "after a rollback the target goes on otherwise than plain decoding")]
    return tuple(checks)


def check(target: Target, taps: tuple[int, ...]) -> SelfTest:
    """Run it: 59 forwards of 1 to 53 tokens, 32 of them of one."""
    began = time.perf_counter()
    measured = measure(target, taps)
    return SelfTest(measured, judge(measured), time.perf_counter() - began)


@torch.inference_mode()
def measure(target: Target, taps: tuple[int, ...]) -> Measured:
    text = tokens(target)
    steps, step_taps = single_steps(target, text, taps)              # [BLOCK, V], [K, BLOCK, H]
    whole = target.forward(text, logits_to_keep=BLOCK).logits[0]
    cache = prefilled(target, text)
    seen = cache.verify(text[:, PROMPT:], taps)
    block, margin = seen.logits[0], steps.float().topk(2, -1).values
    noise = rows_apart(whole, steps).median()
    trace, exact = suffix(target, text)
    flipped = (block.argmax(-1) != steps.argmax(-1)) & (margin[:, 0] - margin[:, 1] > 4 * noise)
    apart = (seen.taps[:, 0].float() - step_taps.float()).abs().amax(-1) / step_taps.float().abs().amax((-1, -2))[:, None]
    return Measured(
        dtype=target.dtype, exact=exact, largest=float(steps.abs().max()), noise=float(noise),
        block=float(rows_apart(block, steps).median()), block_largest=float(rows_apart(block, steps).max()), disagreed=int(flipped.sum()),
        taps=float(apart.median(-1).values.max()), held=all(held(target, text, size) for size in (1, BLOCK)), crop=crop(target, text),
        suffix=trace, fold=fold(target, text) if target.is_hybrid else None, after=after(target, text, steps))


def tokens(target: Target) -> Tensor:
    """[1, PROMPT + BLOCK] int64: a fixed text, and how the target itself goes on, so that the block holds likely tokens."""
    ids = (target.tokenizer(TEXT, add_special_tokens=False).input_ids * PROMPT)[:PROMPT]
    text, cache = torch.tensor([ids], device=target.device), target.new_cache()
    piece = text
    for _ in range(BLOCK):
        piece = target.forward(piece, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
        text = torch.cat([text, piece], 1)
    return text


def single_steps(target: Target, text: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The last BLOCK tokens one by one on the library's own cache -> logits [BLOCK, V], taps [K, BLOCK, H]."""
    cache = target.new_cache()
    target.forward(text[:, :PROMPT], cache=cache)
    outs = [target.forward(token, cache=cache, taps=taps) for token in text[:, PROMPT:].split(1, 1)]
    return torch.cat([out.logits[0] for out in outs]), torch.cat([out.taps[:, 0] for out in outs], 1)


def prefilled(target: Target, text: Tensor, rule: str = "fold") -> TargetCache:
    cache = TargetCache(target, rule)
    cache.prefill(text[:, :PROMPT])
    return cache


def rejected(target: Target, text: Tensor, seed: int) -> Tensor:
    """A block of which KEPT tokens are the text's, and none of the others: drawn by seed."""
    shift = torch.randint(1, target.vocab_size, (1, BLOCK - KEPT), generator=torch.Generator().manual_seed(seed)).to(text.device)
    return torch.cat([text[:, PROMPT:PROMPT + KEPT], (text[:, PROMPT + KEPT:] + shift) % target.vocab_size], 1)


def held(target: Target, text: Tensor, size: int) -> bool:
    cache = prefilled(target, text)
    before = {name: state.clone() for name, state in cache.states().items()}
    cache.verify(text[:, PROMPT:PROMPT + size])
    return all(torch.equal(state, before[name]) for name, state in cache.states().items() if is_linear(name))


def crop(target: Target, text: Tensor) -> bool:
    cache = prefilled(target, text)
    cache.verify(rejected(target, text, 0))
    before = {name: state[..., :PROMPT + KEPT, :].clone() for name, state in cache.states().items() if not is_linear(name)}
    cache.commit(KEPT)
    return all(torch.equal(state, before[name]) for name, state in cache.states().items() if not is_linear(name))


def suffix(target: Target, text: Tensor) -> tuple[float, bool]:
    """-> difference, whether none at all is to be expected"""
    found = []
    with experts_one_by_one(target) as alone:
        for seed in (1, 2):
            cache = prefilled(target, text)
            kept = cache.verify(rejected(target, text, seed)).logits[0, :KEPT]
            cache.commit(KEPT)
            found.append({name: state.clone() for name, state in cache.states().items()} | {"kept": kept})
            found[-1]["next"] = cache.verify(text[:, PROMPT + KEPT:]).logits[0]
    return worst(*found), alone and target.device.type == "cpu"


def fold(target: Target, text: Tensor) -> float:
    """Linear layers only; their inputs are the same block's, so no layer's error meets the next."""
    apart = []
    for kept in (KEPT, BLOCK):                                       # a block that is kept whole takes another path
        found = []
        for rule in ("fold", "replay"):
            cache = prefilled(target, text, rule)
            cache.verify(rejected(target, text, 0))
            cache.commit(kept)
            found.append({name: state for name, state in cache.states().items() if is_linear(name)})
        apart.append(worst(*found))
    return float(torch.tensor(apart).max())                          # max() would lose what is no number


def after(target: Target, text: Tensor, steps: Tensor) -> float:
    cache = prefilled(target, text)
    cache.verify(rejected(target, text, 0))
    cache.commit(KEPT)
    return float(rows_apart(cache.verify(text[:, PROMPT + KEPT:]).logits[0], steps[KEPT:]).median())


def is_linear(name: str) -> bool:
    return name.endswith((" conv", " recurrent"))


def rows_apart(one: Tensor, other: Tensor) -> Tensor:
    """[R, V] twice -> [R]: the largest difference in each row."""
    return (one.float() - other.float()).abs().amax(-1)


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference as a share of its tensor's largest value; infinite where shapes differ, 0 only where all bits do agree, no number
    where a state holds none."""
    apart = [0.0]
    for name, a in one.items():
        b = other[name]
        if a.shape != b.shape:
            return float("inf")
        if not torch.equal(a, b):
            apart += [torch.finfo(torch.float32).tiny, float((a.float() - b.float()).abs().max() / b.float().abs().max())]
    return float(torch.tensor(apart).max())


@contextlib.contextmanager
def experts_one_by_one(target: Target) -> Iterator[bool]:
    """The experts implementation whose rows do not know of each other -> whether the model now has none that do.

    Our own is one as it stands, for shapes of equal length, which these are (grouped)."""
    own = getattr(target.model.config, "_experts_implementation", None)
    if not any(hasattr(getattr(layer, "mlp", None), "experts") for layer in target.text.layers):
        yield True
    elif own == "triton":
        yield True
    elif own is None:
        yield False
    else:
        target.model.set_experts_implementation("batched_mm")
        try:
            yield True
        finally:
            target.model.set_experts_implementation(own)
