"""A drafter on disk: config.json, model.safetensors, record.json and, where it may draft some tokens only, shortlist.safetensors
in one folder that is whole or refused.

The folder is z-lab's released format (dflash-facts 5a), so it loads elsewhere unchanged; record.json says which run, step,
data and code made it.  Loading is strict both ways and believes no length before checking it (pitfalls C2, C3)."""
from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from common import jsons
from common.drafter import vocab
from common.drafter.config import DrafterConfig
from common.drafter.model import Drafter
from common.errors import CorruptError
from common.files import whole_folder

CONFIG, WEIGHTS, RECORD, SHORTLIST = "config.json", "model.safetensors", "record.json", "shortlist.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}     # as config.json says it
MOST_HEADER = 1 << 20          # bytes; 69 tensors need about 8 KiB
MOST_JSON = 1 << 20            # bytes of config.json and record.json each


def save(folder: Path, drafter: Drafter, record: dict, dtype: torch.dtype = torch.bfloat16, weights: dict[str, Tensor] | None = None) -> None:
    """Write the folder under a temporary name beside it, make it durable, rename.  A folder of that name is replaced.

    record: arm, seed, step, tokens, contract hash, versions: anything JSON can hold; where the drafter has a shortlist,
    "shortlist", its length, is added to it.  weights: by name, where the drafter itself holds shares of them only.
    ValueError on a dtype that load would refuse; a failure leaves no temporary folder and the older checkpoint as it was."""
    if dtype not in NAMES:
        raise ValueError(f"checkpoints are {', '.join(NAMES.values())}, not {dtype}")
    with whole_folder(folder) as temporary:
        tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in (weights or drafter.state_dict()).items()}
        safetensors.torch.save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        _write_json(temporary / CONFIG, drafter.config.to_json() | {"dtype": NAMES[dtype]})
        if drafter.shortlist is not None:
            safetensors.torch.save_file({"d2t": vocab.to_d2t(drafter.shortlist.cpu())}, temporary / SHORTLIST)
            record = record | {"shortlist": len(drafter.shortlist)}
        _write_json(temporary / RECORD, record)


def load(folder: Path, device: torch.device | str, dtype: torch.dtype) -> tuple[Drafter, DrafterConfig, dict]:
    """The folder's drafter on device in dtype, its config and its record ({} where the folder is somebody else's release).

    The drafter's shortlist is set where the record says that there is one.  CorruptError names what is wrong: a config key, a
    tensor missing, extra, misshapen, of another dtype, not finite, or a file shorter or longer than it says."""
    config_json = read_json(folder / CONFIG)
    config = DrafterConfig.from_json(config_json)
    record = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
    drafter = Drafter(config)
    shapes = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    stored = check_header(read_header(folder / WEIGHTS), shapes)
    if (said := config_json.get("dtype", NAMES[stored])) != NAMES[stored]:
        raise CorruptError(f"checkpoint: {CONFIG} says dtype {said!r}, {WEIGHTS} holds {NAMES[stored]}")
    tensors = read_tensors(folder / WEIGHTS)
    drafter.load_state_dict({name: value.to(device, dtype) for name, value in tensors.items()}, strict=True, assign=True)
    shortlist = read_shortlist(folder / SHORTLIST, record.get("shortlist"), config.vocab_size)
    drafter.shortlist = None if shortlist is None else shortlist.to(device)
    return drafter, config, record


def read_shortlist(path: Path, size: object, vocab_size: int) -> Tensor | None:
    """The list of `size` tokens, [K] int64 ascending, that a record speaks of; None where it speaks of none.

    The file holds d2t, offsets as in vocab.to_d2t.  CorruptError where record and file do not agree, or it is no such list."""
    if path.exists() != (size is not None):
        raise CorruptError(f"checkpoint: {path.name} is {'there' if size is None else 'missing'}, {RECORD} speaks of "
                           f"{'no list' if size is None else f'a list of {size} tokens'}")
    if size is None:
        return None
    header = read_header(path)
    if set(header) != {"d2t"} or header["d2t"]["dtype"] != "I64" or header["d2t"]["shape"] != [size]:
        raise CorruptError(f"checkpoint: {path.name} holds {header}, expected d2t, I64, [{size}]")
    try:
        ids = vocab.from_d2t(safetensors.torch.load_file(path)["d2t"])
        vocab.check(ids, vocab_size)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CorruptError(f"checkpoint: {path.name}: {error}") from None
    return ids


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file whose header was checked.  CorruptError names one that is not finite."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise CorruptError(f"checkpoint: {path.name}: {error}") from None
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CorruptError(f"checkpoint: {name} is not finite")
    return tensors


def read_header(path: Path) -> dict[str, dict]:
    """The tensors that a safetensors file announces, before any is read; lengths are checked against the file's."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(MOST_HEADER, size - 8):
                raise CorruptError(f"checkpoint: {path.name}: header of {length} bytes in a file of {size}, at most {MOST_HEADER}")
            header = jsons.loads(file.read(length))
    except OSError as error:
        raise CorruptError(f"checkpoint: {path.name}: {error.strerror}") from None
    except ValueError:
        raise CorruptError(f"checkpoint: {path.name}: the header is no JSON") from None
    if not isinstance(header, dict):
        raise CorruptError(f"checkpoint: {path.name}: the header is no table")
    header.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in header.values() if _is_entry(entry)]
    if len(ends) != len(header):
        bad = next(name for name, entry in header.items() if not _is_entry(entry))
        raise CorruptError(f"checkpoint: {bad}: no dtype, shape and data_offsets")
    if 8 + length + max(ends, default=0) != size:
        raise CorruptError(f"checkpoint: {path.name}: {size} bytes, its header says {8 + length + max(ends, default=0)}")
    return header


def check_header(header: dict[str, dict], shapes: dict[str, tuple[int, ...]]) -> torch.dtype:
    """Exactly these names and shapes, all of one dtype, which is returned."""
    if missing := sorted(set(shapes) - set(header)):
        raise CorruptError(f"checkpoint: {missing[0]} is missing ({len(missing)} in all)")
    if extra := sorted(set(header) - set(shapes)):
        raise CorruptError(f"checkpoint: {extra[0]} is not part of this drafter ({len(extra)} in all)")
    first = header[next(iter(shapes))]["dtype"]
    for name, shape in shapes.items():
        if tuple(header[name]["shape"]) != shape:
            raise CorruptError(f"checkpoint: {name} has shape {header[name]['shape']}, expected {list(shape)}")
        if header[name]["dtype"] not in DTYPES:
            raise CorruptError(f"checkpoint: {name} is {header[name]['dtype']}, expected one of {', '.join(DTYPES)}")
        if header[name]["dtype"] != first:
            raise CorruptError(f"checkpoint: {name} is {header[name]['dtype']}, {next(iter(shapes))} is {first}")
    return DTYPES[first]


def checkpoint_hash(folder: Path) -> str:
    """sha256 hex over what decides a draft: config.json, model.safetensors and, where there is one, the list of tokens.

    record.json tells of it, and may differ."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS, *([SHORTLIST] if (folder / SHORTLIST).exists() else [])):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _is_entry(entry: object) -> bool:
    return (isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and isinstance(entry.get("shape"), list)
            and isinstance(offsets := entry.get("data_offsets"), list) and len(offsets) == 2
            and all(type(n) is int and n >= 0 for n in offsets))


def _write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


def read_json(path: Path) -> dict:
    try:
        if path.stat().st_size > MOST_JSON:
            raise CorruptError(f"checkpoint: {path.name} is larger than {MOST_JSON} bytes")
        data = jsons.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CorruptError(f"checkpoint: {path.name}: {error.strerror}") from None
    except ValueError:
        raise CorruptError(f"checkpoint: {path.name} is no JSON") from None
    if not isinstance(data, dict):
        raise CorruptError(f"checkpoint: {path.name} is no table")
    return data
