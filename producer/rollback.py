"""A target's cache that can see a whole block and keep only its accepted prefix (DESIGN section 6; pitfalls S1, S2).

Attention layers forget by cutting rows.  Gated DeltaNet layers cannot: their state has swallowed the block.  So while a
block is verified their writes are held back (StagedLinearLayer), and `commit(n)` advances them over n tokens only:

    fold     from what the verify itself projected: convolution inputs, gates and rates; only the delta rule is redone,
             for all layers at once.  A block that is kept whole needs not even that.  The default.
    replay   the plain twin: each layer's linear_attn runs once more over the accepted tokens.

A test holds the two equal, and the state equal to one-token decoding's.  Nothing of transformers is patched; a build that
does not run the layers as this expects is refused after the first verify.  Left out: batches, sliding attention layers
of a target (refused), and layers of one target on several devices beyond grouping them by device.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from common.errors import UserError
from producer.target import Forward, Target

RULES = ("fold", "replay")
RECORDED = {"fold": ("linear_attn.in_proj_a", "linear_attn.in_proj_b"), "replay": ("input_layernorm",)}
EPSILON = 1e-6               # of the keys' l2 norm, as in the kernels


class StagedLinearLayer(LinearAttentionLayer):
    """A linear-attention cache layer whose writes are held back while `staged`.

    update_conv_state then returns the columns that the convolution needs and keeps them in `pending` [1, C, K + T];
    update_recurrent_state keeps the end-of-block state in `ended` [1, Hv, Dk, Dv].  record_past reads true, because the
    model asks for it before it lets a one-token forward change conv_states in place: without that a block of one token
    would leak.
    """

    staged = False
    pending: Tensor | None = None
    ended: Tensor | None = None

    @property
    def record_past(self) -> bool:
        return self.staged or self._record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._record_past = value

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        if not self.staged:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        self.pending = torch.cat([self.conv_states[state_idx], conv_states], -1)
        return self.pending

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        if not self.staged:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self.ended = recurrent_states
        return recurrent_states


class TargetCache:
    """One text's cache.  prefill (as often as pieces of the prompt), then verify and commit in turn.

    length: tokens whose state is held.  Raises UserError for a target whose cache cannot be rolled back.
    """

    def __init__(self, target: Target, rule: str = "fold") -> None:
        if rule not in RULES:
            raise ValueError(f"rule {rule!r}: one of {', '.join(RULES)}")
        self._target, self._rule = target, rule
        self._cache = target.new_cache()
        layers = self._cache.layers
        for i, layer in enumerate(layers):
            if type(layer) is LinearAttentionLayer:
                layers[i] = StagedLinearLayer(number_of_states=layer.number_of_states)
            elif type(layer) is not DynamicLayer:
                raise UserError(f"{target.name}: layer {i} keeps its past in a {type(layer).__name__}, which cannot be rolled back")
        self._linear = {i: layer for i, layer in enumerate(layers) if isinstance(layer, StagedLinearLayer)}
        self._attention = [layer for layer in layers if isinstance(layer, DynamicLayer)]
        self._groups = _groups(target, self._linear) if rule == "fold" else []
        self._records: dict[tuple[int, str], Tensor] = {}
        self._block = 0                                              # tokens verified and not yet committed
        self.length = 0

    def prefill(self, ids: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        """Continue with ids [1, P] int64, all of them kept -> logits of the last row, taps [K, 1, P, H]."""
        self._expect_block(False)
        out = self._target.forward(ids, cache=self._cache, taps=taps)
        self.length += ids.shape[1]
        return out

    def verify(self, block: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        """See a block [1, T] int64, T >= 1 -> all T rows of logits, taps [K, 1, T, H].  `commit` must follow."""
        self._expect_block(False)
        if not self.length:
            raise RuntimeError("a block can only be verified after a prefill")
        self._records.clear()
        with self._held_back():
            out = self._target.forward(block, cache=self._cache, taps=taps, logits_to_keep=0, short=True)
        self._block = block.shape[1]
        self._check()
        return out

    @torch.inference_mode()
    def commit(self, n: int) -> None:
        """Keep the block's first n tokens, 1 <= n <= T; the rest leaves no trace."""
        self._expect_block(True)
        if not 1 <= n <= self._block:
            raise ValueError(f"{n} tokens of a block of {self._block}")
        if n < self._block:
            for layer in self._attention:
                layer.crop(n - self._block)
        for group in self._groups:
            if n == self._block and (n == 1 or self._target.rule_is_fp32):
                group.take()
            else:
                group.fold(self._records, n)
        if self._rule == "replay":
            for i in self._linear:
                self._target.text.layers[i].linear_attn(self._records[i, "input_layernorm"][:, :n], self._cache)
        self._block = 0
        self.length += n

    def states(self) -> dict[str, Tensor]:
        """Everything held now, by layer and kind ("3 keys", "4 recurrent"): the tensors themselves, not copies."""
        found = {}
        for i, layer in enumerate(self._cache.layers):
            if i in self._linear:
                found |= {f"{i} conv": layer.conv_states[0], f"{i} recurrent": layer.recurrent_states[0]}
            else:
                found |= {f"{i} keys": layer.keys, f"{i} values": layer.values}
        return found

    @contextlib.contextmanager
    def _held_back(self) -> Iterator[None]:
        """For one forward: linear layers staged, and hooks on the modules whose output the rule needs."""
        hooks = []
        for i, layer in self._linear.items():
            layer.staged, layer.pending, layer.ended = True, None, None
            for name in RECORDED[self._rule]:
                hooks.append(self._target.text.layers[i].get_submodule(name).register_forward_hook(self._recorder(i, name)))
        try:
            yield
        finally:
            for layer in self._linear.values():
                layer.staged = False
            for hook in hooks:
                hook.remove()

    def _recorder(self, layer: int, name: str):
        return lambda _module, _args, out: self._records.__setitem__((layer, name), out)

    def _expect_block(self, expected: bool) -> None:
        if bool(self._block) != expected:
            raise RuntimeError("commit without a verified block" if expected else "the last block is not committed")

    def _check(self) -> None:
        """Did this build of transformers run the layers as commit needs it?  Cheap: shapes only, every verify."""
        tokens, wrong = self._block, None
        for i, layer in self._linear.items():
            if layer.ended is None or layer.ended.dtype != layer.recurrent_states[0].dtype:
                wrong = f"layer {i} gave no state at the block's end"
            if layer.pending is None or layer.pending.shape[-1] != layer.conv_states[0].shape[-1] + tokens:
                wrong = f"layer {i} gave no convolution inputs of the block"
            for name in RECORDED[self._rule]:
                if (i, name) not in self._records or self._records[i, name].shape[:2] != (1, tokens):
                    wrong = f"layer {i} did not run {name} over the block"
        if any(layer.get_seq_length() != self.length + tokens for layer in self._attention):
            wrong = "an attention layer did not store the block's rows"
        if wrong:
            raise UserError(f"{self._target.name}: transformers {transformers.__version__} does not run this model the way a rollback "
                            f"needs ({wrong}); use a version that pyproject.toml names")


@dataclass(eq=False)
class _Group:
    """The linear layers on one device, in order.  L layers, Hk key and Hv value heads, C = Hk * Dk + Hv * Dv channels."""

    layers: dict[int, StagedLinearLayer]
    modules: list[nn.Module]
    kernel: Tensor              # [L, K, C], fp32: the convolution's weights for keys and values; queries only feed the output
    bias: Tensor | None         # [L, 1, C], fp32
    decay: Tensor               # [L, Hv, 1], fp32, negative
    dt_bias: Tensor             # [L, Hv, 1]
    _gathered: dict[str, tuple[Tensor, tuple[Tensor, ...]]] = field(default_factory=dict)

    def take(self) -> None:
        """The block is kept whole, so the states at its end, which the verify itself came to, are the states.

        Not where a library's kernel came to them in bf16 over several tokens: the error of each such block would stay."""
        conv, states = self._together("conv_states"), self._together("recurrent_states")
        torch.cat([layer.pending[..., -conv.shape[-1]:] for layer in self.layers.values()], out=conv)
        torch.cat([layer.ended for layer in self.layers.values()], out=states)

    def fold(self, records: dict[tuple[int, str], Tensor], n: int) -> None:
        """Advance every layer's convolution and recurrent state over the block's first n tokens."""
        module = self.modules[0]
        conv, states = self._together("conv_states"), self._together("recurrent_states")
        seen = torch.cat([layer.pending for layer in self.layers.values()])[..., :conv.shape[-1] + n]      # [L, channels, K + n]
        conv.copy_(seen[..., n:])
        a, b = (torch.cat([records[i, name] for i in self.layers])[:, :n].transpose(1, 2) for name in RECORDED["fold"])    # [L, Hv, n]
        g = self.decay * F.softplus(a.float() + self.dt_bias)
        x = self._convolve(seen[:, module.key_dim:].transpose(1, 2), n).float()                           # [L, n, C]
        k, v = x.split((module.key_dim, x.shape[-1] - module.key_dim), -1)
        k, v = k.unflatten(-1, (-1, module.head_k_dim)), v.unflatten(-1, (-1, module.head_v_dim))         # [L, n, heads, D]
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + EPSILON)
        k = k.transpose(1, 2)[:, :, None].expand(-1, -1, v.shape[2] // k.shape[2], -1, -1)                # a key head serves neighbours
        advance(states.flatten(0, 1), k.reshape(-1, *k.shape[3:]), v.transpose(1, 2).flatten(0, 1), g.flatten(0, 1),
                b.sigmoid().float().flatten(0, 1))

    def _convolve(self, columns: Tensor, n: int) -> Tensor:
        """columns [L, K + n, C] -> activated outputs of the last n, [L, n, C]; rounded where the model's convolution rounds.

        Written out: faster than a grouped convolution here (measured on a CPU), and no library tunes itself anew for every n."""
        taps = self.kernel.shape[1]
        first = columns.shape[1] - n - taps + 1
        columns = columns.float().contiguous()
        out = columns[:, first:first + n] * self.kernel[:, :1]
        for k in range(1, taps):
            out.addcmul_(columns[:, first + k:first + k + n], self.kernel[:, k:k + 1])
        if self.bias is not None:
            out += self.bias
        module = self.modules[0]
        return ACT2FN[module.activation](out.to(module.conv1d.weight.dtype))

    def _together(self, kind: str) -> Tensor:
        """All layers' conv_states [L, channels, K] or recurrent_states [L, Hv, Dk, Dv] as one tensor, each layer's own being a
        view of it, so that none is copied.  A layer that was given a new tensor since is noticed: they are gathered anew."""
        whole, views = self._gathered.get(kind, (None, ()))
        own = [getattr(layer, kind) for layer in self.layers.values()]
        if whole is None or any(states[0] is not view for states, view in zip(own, views, strict=True)):
            whole = torch.cat([states[0] for states in own])
            views = whole[:, None].unbind(0)
            self._gathered[kind] = whole, views
            for states, view in zip(own, views, strict=True):
                states[0] = view
        return whole


def advance(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """The gated delta rule over n tokens, state only, in place: the same recurrence as one-token decoding, token by token.

        S_t = e^g_t S_{t-1} + k_t u_t',   u_t = beta_t (v_t - (e^g_t S_{t-1})' k_t)

    S_{t-1} is known by the state before the block and the u's so far, so u solves one triangular system, and the large state is
    read once and written once, however many tokens there are.  Decays between two tokens are sums of their g, not differences
    of sums: exponents never exceed 0 and nothing cancels.

    state [N, Dk, Dv] fp32, changed;  k [N, n, Dk] of norm 1, v [N, n, Dv];  g <= 0 and beta, both [N, n];  all fp32
    """
    between = (g[..., None] * _after(g.shape[-1], g.device)).cumsum(1).exp()     # [N, t, s]: decay from after token s to token t, s < t
    decay = g.cumsum(-1).exp()                                      # [N, t]: from before the block to token t
    u = beta[..., None] * torch.addcmul(v, decay[..., None], k @ state, value=-1)
    if g.shape[-1] > 1:                                             # what u_s, s < t, takes from u_t; the rest is not read
        pull = (k @ k.transpose(1, 2)) * between * beta[..., None]
        torch.linalg.solve_triangular(pull, u, upper=False, unitriangular=True, out=u)      # out: five times faster, for it keeps rows
    state.mul_(decay[:, -1, None, None]).baddbmm_(k.transpose(1, 2), u * between[:, -1, :, None])


@functools.cache
def _after(n: int, device: torch.device) -> Tensor:
    """[t, s] bool: t comes after s."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril(-1)


def _groups(target: Target, linear: dict[int, StagedLinearLayer]) -> list[_Group]:
    devices: dict[torch.device, list[int]] = {}
    for i in linear:
        devices.setdefault(target.text.layers[i].linear_attn.A_log.device, []).append(i)
    groups = []
    for indexes in devices.values():
        modules = [target.text.layers[i].linear_attn for i in indexes]
        first = modules[0].key_dim
        bias = None if modules[0].conv1d.bias is None else torch.stack([m.conv1d.bias[None, first:].float() for m in modules])
        groups.append(_Group(
            {i: linear[i] for i in indexes}, modules, torch.stack([m.conv1d.weight[first:, 0].T.float() for m in modules]), bias,
            torch.stack([-m.A_log.float().exp()[:, None] for m in modules]), torch.stack([m.dt_bias[:, None] for m in modules])))
    return groups
