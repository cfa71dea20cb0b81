"""A target's weights out of its safetensors files: which files are opened, how they are read, and that none is missing.

transformers' loader opens every shard, and either maps it (on a GPU that shares the host's memory mapped pages count
beside the device's copy: 67 GB do not fit in 125 GB) or reads all shards whole before the first weight is placed.  Here
the index says which shard holds which weight; a shard without one that this model asks for (the vision tower's, the mtp
head's) is never opened, and each weight is read by itself into pages of its own, which go back to the system the moment
it is moved: malloc would keep half of them (measured: 1.4 copies instead of 1.1).  What a name becomes (the language_model
prefix; experts one by one or fused, as Qwen releases them) stays transformers' business: it gets the weights as from its
own loader, lazily.  Left out: .bin files, and where the module goes (target).
"""
from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from common import jsons
from common.errors import UserError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
          "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
          "F8_E5M2": torch.float8_e5m2}
LONGEST_HEADER = 100_000_000             # bytes; the format's own limit
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def read(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The text model of a checkpoint folder, on the CPU, in its own memory: one copy of the weights, and while it is read one more
    of the weight in hand (of a layer's experts, where they lie one by one and are stacked).

    Raises UserError, naming the first weight: one that is missing, that the model does not know, or of another shape; a
    file that is missing or damaged.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)             # the text model's class, and what it does without
    files = shards(placed(folder), tuple(empty._keys_to_ignore_on_load_unexpected or ()))
    if few := uneven([name for names in files.values() for name in names]):
        raise UserError(f"{folder} holds experts of {few[0]} for some only; fetch it again")
    found = {name: weight for file, names in files.items() for name, weight in chosen(folder / file, names).items()}
    try:
        model, info = type(empty).from_pretrained(None, config=empty.config, state_dict=found, dtype=dtype, output_loading_info=True,
                                                 ignore_mismatched_sizes=True)               # refused below, by name
    except RuntimeError as error:
        raise UserError(f"{folder}: {' '.join(str(error).split())}") from None
    if missing := sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"])):
        raise UserError(f"{folder} lacks {len(missing)} weights, {missing[0]} first; they would be random")
    if unknown := sorted(info["unexpected_keys"]):
        raise UserError(f"{folder} holds {len(unknown)} weights that {type(model).__name__} does not have, {unknown[0]} first; "
                        "they would be left out silently")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def placed(folder: Path) -> dict[str, str]:
    """Every weight's name in the files -> the file that holds it; by the index, where there is one, and by nothing else."""
    if (folder / INDEX).is_file():
        try:
            return dict(jsons.loads((folder / INDEX).read_text("utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / INDEX} is no index of weights ({error!r}); fetch it again") from None
    if not (folder / SINGLE).is_file():
        raise UserError(f"{folder} holds neither {INDEX} nor {SINGLE}: only safetensors are read")
    return dict.fromkeys(contents(folder / SINGLE), SINGLE)


def shards(where: dict[str, str], ignored: tuple[str, ...]) -> dict[str, list[str]]:
    """name -> file, patterns of names that the model does without  ->  file -> the names wanted from it; files without one left out."""
    wanted: dict[str, list[str]] = {}
    for name, file in where.items():
        if not any(re.search(pattern, name) for pattern in ignored):
            wanted.setdefault(file, []).append(name)
    return wanted


def uneven(names: list[str]) -> list[str]:
    """Of checkpoints with experts one by one: the projections, as layers.2.mlp.experts.*.up_proj, that fewer experts have than others."""
    counts = Counter(re.sub(r"\.experts\.\d+\.", ".experts.*.", name) for name in names)
    stacked = {name: count for name, count in counts.items() if ".experts.*." in name}
    return sorted(name for name, count in stacked.items() if count < max(stacked.values()))


def chosen(path: Path, names: list[str]) -> dict[str, Weight]:
    held = contents(path)
    if absent := sorted(set(names) - set(held)):
        raise UserError(f"{path} lacks {len(absent)} weights that the index places there, {absent[0]} first; fetch the file again")
    return {name: held[name] for name in names}


@dataclass(frozen=True)
class Weight:
    """One weight in its file.  weight[...] reads it, as a slice of the safetensors library does."""

    path: Path
    begin: int                           # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, whole: object) -> Tensor:
        if whole is not ...:
            raise TypeError("a weight is read whole: weight[...]")
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        pages = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin)
            got, view = 0, memoryview(pages)
            while got < self.nbytes:                                 # one read gives 2 GiB at most
                step = file.readinto(view[got:])
                if not step:
                    raise UserError(f"{self.path} ended while it was read; fetch the file again")
                got += step
        return torch.frombuffer(pages, dtype=self.dtype).view(self.shape)


def contents(path: Path) -> dict[str, Weight]:
    """What a safetensors file holds, by its header: 8 bytes of length, JSON, data.  UserError for one that does not fit its own size."""
    try:
        with open(path, "rb") as file:
            [length] = struct.unpack("<Q", file.read(8))
            if length > min(LONGEST_HEADER, path.stat().st_size - 8):
                raise ValueError("its header is longer than the file")
            header = jsons.loads(file.read(length))
        header.pop("__metadata__", None)
        held = {name: Weight(path, 8 + length + at["data_offsets"][0], DTYPES[at["dtype"]], tuple(at["shape"]))
                for name, at in header.items()}
        ends = [8 + length + at["data_offsets"][1] for at in header.values()]
        if any(weight.begin + weight.nbytes != end for weight, end in zip(held.values(), ends)) or max(ends) != path.stat().st_size:
            raise ValueError("its header does not fit its size")
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error}); fetch the file again") from None
    return held
