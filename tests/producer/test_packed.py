"""Packed matrices say what plain ones say, and nothing that reads the weights notices."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from producer import identity, packed

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024, bias=False), nn.SiLU(), nn.Linear(1024, 512), nn.Linear(512, 8)).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 200])
def test_it_is_the_plain_product_but_for_rounding(rows):
    plain, x = network(), torch.randn(1, rows, 512, generator=torch.Generator().manual_seed(rows))
    fast = copy.deepcopy(plain)
    assert packed.pack(fast) == 2 and packed.is_packed(fast) and not packed.is_packed(plain)         # the third is too small to gain
    with torch.inference_mode():
        want, got = plain(x), fast(x)
    assert got.shape == want.shape and float((got - want).abs().max() / want.abs().max()) < 1e-5


def test_weights_stay_as_they_were():
    plain = network()
    fast = copy.deepcopy(plain)
    packed.pack(fast)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), fast.state_dict().values(), strict=True))
    assert list(plain.state_dict()) == list(fast.state_dict()) and identity.weights(plain) == identity.weights(fast)
    assert packed.pack(fast) == 0                                    # once is enough


def test_only_fp32_and_only_so_much(monkeypatch):
    assert packed.pack(network(torch.bfloat16)) == 0
    monkeypatch.setattr(packed, "MOST", 4 << 20)
    assert packed.pack(network()) == 2                               # two of 2 MiB
    monkeypatch.setattr(packed, "MOST", (4 << 20) - 1)
    assert packed.pack(network()) == 0
