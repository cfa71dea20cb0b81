"""A drafter too large for one card: each rank holds a share of every matrix, of its gradient and of Adam's moments (torch's FSDP2).

Attention, MLP and fc are gathered one after another as a step reaches them, so that what a card holds whole is the largest of
them.  The numbers are those of DDP: gradients are averaged over ranks.  Left out: Muon, whose update needs whole matrices."""
from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from common.drafter.model import Drafter
from common.errors import UserError

# Keys and values go out of attention transposed; nothing here writes to them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def check(world: int, optimizer: str) -> None:
    """UserError for a run that cannot be held in shares."""
    if world == 1:
        raise UserError("--shard shares a drafter out over several ranks: start it as torchrun --nproc-per-node N -m trainer run ...")
    if optimizer != "adamw":
        raise UserError(f"--shard with {optimizer}: its update needs whole matrices; use --optimizer adamw")


@torch.no_grad()
def shard(drafter: Drafter, world: int, device: torch.device) -> None:
    """In place: rank 0's weights, in shares on `device`, wherever they were.  Every rank calls it, and `whole` from then on.

    Whole matrices pass through the device one at a time."""
    from torch.distributed.device_mesh import init_device_mesh            # a second of imports, for these runs alone
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    for parameter in drafter.parameters():
        sent = parameter.detach().to(device)
        dist.broadcast(sent, src=0)
        parameter.copy_(sent)
    mesh = init_device_mesh(device.type, (world,))
    for layer in drafter.layers:
        fully_shard(layer.self_attn, mesh=mesh)
        register_fsdp_forward_method(layer.self_attn, "of_context")
        fully_shard(layer.mlp, mesh=mesh)
    fully_shard(drafter.fc, mesh=mesh)
    fully_shard(drafter, mesh=mesh)


def whole(value: Tensor) -> Tensor:
    """All of a tensor that is held in shares: every rank calls it, in the same order.  Any other tensor as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def as_held(value: Tensor, parameter: Tensor) -> Tensor:
    """value, whole and the same on every rank, as the parameter is held: its device, and this rank's share."""
    value = value.to(parameter.device)
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
