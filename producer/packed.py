"""Dense matrix products on a CPU with the weights laid out for them once, not at every call.

F.linear lays a weight out anew for each call of a few rows: on SmolLM2-135M a verify of 8 tokens cost 1.6 steps of one token,
where memory alone would make it little more than one.  oneDNN keeps the layout.  The weight itself stays beside its packed
copy: fingerprints, embeddings and assets read it, and it must not be changed afterwards.  So memory doubles: fp32 on a CPU only,
and not above MOST.  Sums are formed in another order, so results differ from F.linear's by rounding; the contract records it."""
from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST = 1 << 18         # elements of a matrix: below, the call costs more than the layout (measured, 128 and 576 wide)
MOST = 4 << 30          # bytes of all copies together
ROWS = 16               # what the layout is chosen for; other counts of rows, prefills too, are served as well


class PackedLinear(nn.Linear):
    packed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack(model: nn.Module) -> int:
    """Pack every large fp32 nn.Linear on a CPU, in place -> how many.  None where torch was built without oneDNN, or where the
    copies would take more than MOST."""
    found = [module for module in model.modules() if type(module) is nn.Linear and module.weight.device.type == "cpu"
             and module.weight.dtype == torch.float32 and module.weight.numel() >= LEAST]
    if not torch.backends.mkldnn.is_available() or sum(module.weight.nbytes for module in found) > MOST:
        return 0
    for module in found:
        module.packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.data, ROWS)
        module.__class__ = PackedLinear
    return len(found)


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())
