"""Memory while a released checkpoint is loaded: our reader beside transformers' own, mapped and not.

    python benchmarks/load.py [--millions 250] [--dtype bfloat16]

Writes a random Qwen3.5-MoE checkpoint as Qwen releases it (fused experts, vision and mtp weights beside the text's, shards)
into a temporary folder, loads its text model onto the CPU in a process of its own for each way, then moves it as Module.to
does to a GPU that shares the host's memory: each weight copied, its old memory let go (the copy here is in host memory, for
want of such a GPU).  Peaks above what the process held before, as shares of the text model's own bytes: anonymous memory
(read every 2 ms) and resident memory, mapped pages included (the kernel's high-water mark).  A shard is about a tenth."""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

WAYS = ("ours", "transformers, mapped", "transformers, disable_mmap")
HIDDEN, EXPERTS, LAYERS = 64, 64, 8


def write(folder: Path, millions: int) -> None:
    """bf16; the expert's width carries the size."""
    from safetensors.torch import save_file
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    width = round(millions * 1e6 / (LAYERS * EXPERTS * 3 * HIDDEN))
    text = dict(vocab_size=320, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32, num_experts=EXPERTS,
                num_experts_per_tok=2, moe_intermediate_size=width, shared_expert_intermediate_size=32, tie_word_embeddings=False)
    vision = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=HIDDEN, patch_size=4,
                  num_position_embeddings=16)
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Qwen3_5MoeForConditionalGeneration(config).state_dict().items()}
    shapes |= {"mtp.layers.0.mlp.experts.gate_up_proj": (EXPERTS, 2 * width, HIDDEN), "mtp.norm.weight": (HIDDEN,)}
    names, where = sorted(shapes, key=lambda name: name.startswith(("mtp.", "model.visual."))), {}
    budget, shard, held = 2 * sum(torch.Size(s).numel() for s in shapes.values()) // 10, {}, 0
    for i, name in enumerate(names):
        shard[name] = torch.randn(shapes[name], generator=torch.Generator().manual_seed(i)).bfloat16()
        held += shard[name].nbytes
        if held > budget or name == names[-1]:
            file = f"model-{len(set(where.values())) + 1:05d}.safetensors"
            save_file(shard, folder / file, {"format": "pt"})
            where, shard, held = where | dict.fromkeys(shard, file), {}, 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config.save_pretrained(folder)


def status(key: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


def load(way: str, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    from producer import weights
    if way == "ours":
        return weights.read(folder, dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, disable_mmap=way.endswith("disable_mmap"))


def measure(way: str, warm: Path, folder: Path, dtype: torch.dtype) -> dict:
    load(way, warm, dtype)                                           # imports and first allocations are not the load's
    Path("/proc/self/clear_refs").write_text("5")                    # VmHWM begins again
    anonymous, resident, peak, done = status("RssAnon"), status("VmRSS"), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], status("RssAnon"))
    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    model = load(way, folder, dtype)
    seconds = time.perf_counter() - began
    for weight in model.parameters():
        weight.data = weight.data.clone()
    done.set()
    watcher.join()
    own = sum(p.nbytes for p in model.parameters())
    return {"weights_MB": own / 1e6, "anonymous": (peak[0] - anonymous) / own, "resident": (status("VmHWM") - resident) / own,
            "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=250, help="parameters, in millions")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)    # way, small folder, folder: what each child measures
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        way, warm, folder = args.one
        print(json.dumps(measure(way, Path(warm), Path(folder), getattr(torch, args.dtype))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        warm, folder = Path(scratch, "warm"), Path(scratch, "folder")
        for place, millions in ((warm, 1), (folder, args.millions)):
            place.mkdir()
            write(place, millions)
        for way in WAYS:
            command = [sys.executable, __file__, "--dtype", args.dtype, "--one", way, str(warm), str(folder)]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"{way:27} {row['weights_MB']:5.0f} MB of weights in {row['seconds']:4.1f} s; loaded and moved, peak of anonymous memory "
                  f"{row['anonymous']:.2f}, resident {row['resident']:.2f} copies", flush=True)


if __name__ == "__main__":
    main()
