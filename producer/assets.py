"""What the trainer needs of the target besides hidden states, as files: embedding, output head, tokenizer, config.

The trainer pulls them once and caches them by sha256; it needs no copy of the target."""
from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.files import publish_folder
from producer.target import Target


def write(target: Target, folder: Path) -> dict[str, Path]:
    """{asset name: file}, written once: a folder that exists is whole (it appears by rename).

    A tied head is not written: the trainer uses the embedding where no lm_head is offered.
    """
    if not folder.exists():
        temporary = folder.with_name(f".{folder.name}.tmp")
        temporary.mkdir(parents=True, exist_ok=True)
        save_file({"weight": target.embedding.detach().cpu().contiguous()}, temporary / "embedding.safetensors")
        if target.head.data_ptr() != target.embedding.data_ptr() and not torch.equal(target.head, target.embedding):
            save_file({"weight": target.head.detach().cpu().contiguous()}, temporary / "lm_head.safetensors")
        target.tokenizer.save_pretrained(temporary / "tokenizer")
        (temporary / "tokenizer.json").write_bytes((temporary / "tokenizer" / "tokenizer.json").read_bytes())
        (temporary / "target_config.json").write_text(json.dumps(target.model.config.to_dict(), default=str))
        publish_folder(temporary, folder)
    names = {"embedding": "embedding.safetensors", "lm_head": "lm_head.safetensors", "tokenizer": "tokenizer.json",
             "target_config": "target_config.json"}
    return {name: folder / file for name, file in names.items() if (folder / file).exists()}

