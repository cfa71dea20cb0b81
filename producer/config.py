"""Settings of the producer's commands: each option once, with its default and unit."""
from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from common.settings import argument, option, state_home

ADDRESS = "tcp://127.0.0.1:5757"
Mode = Literal["generate", "prefill"]
FORCE = "Use a drafter that was trained under another contract; the text is the target's all the same."
FILES = ("a file of prompts (JSON lines or an array with \"prompt\", \"messages\" or ShareGPT's \"conversations\"; HumanEval's; MT-Bench's; "
         ".txt, one a line; .parquet; also .gz), or hub:OWNER/NAME[:split]")
Experts = Literal["auto", "eager", "grouped_mm", "batched_mm", "triton"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The target, and where it runs."""

    target: str = option("Qwen/Qwen3.6-35B-A3B", "The target: a folder, a hub id in the local cache, 'embedded' or 'smollm2'.")
    thinking: bool | None = option(None, "The chat template's thinking switch, where it has one; part of the contract. "
                                   "Default: the template's own.", show_default=False)
    device: str = option("auto", "cuda (CUDA and ROCm alike), cpu, or auto.")
    dtype: str = option("auto", "float32 or bfloat16; auto: bfloat16 on a GPU, float32 on a CPU.")
    threads: int = option(0, "CPU threads for torch; 0: torch's own choice.", min=0)
    experts: Experts = option("auto", "What computes the experts of a mixture; part of the contract. auto: the fastest here, by stop-watch; "
                              "hsprod serve goes on with what its stream began with.")


@dataclass(frozen=True, kw_only=True)
class Answers(Model):
    """What answers are made of: a target, and how it chooses."""

    temperature: float = option(0.0, "Sampling temperature of the answers; 0 is greedy.", min=0.0)
    top_k: int = option(0, "Sample among the k likeliest tokens; 0: all.", min=0)
    top_p: float = option(1.0, "Sample among the likeliest tokens of this joint probability.", min=0.0, max=1.0)
    seed: int = option(0, "Seed of sampled answers.")
    max_new_tokens: int = option(1024, "Longest answer, in tokens.", min=1)


@dataclass(frozen=True, kw_only=True)
class Generate(Answers):
    prompt: str | None = argument("The prompt's text: one turn of the user.", None)
    prompts: Path | None = option(None, f"Instead of one prompt: {FILES}; - reads standard input.")
    drafter: Path | None = option(None, "Folder of a drafter: a checkpoint of ours or a released one. Default: plain decoding.")
    force: bool = option(False, FORCE)
    block_size: int = option(0, "Slots a block, the known token's included; 0: the drafter's own.", min=0)
    verify_len: str = option("full", "Slots of each block to verify: full, a number, or auto: chosen anew for each block from measured times "
                             "and the running acceptance. At a temperature one seed's text depends on where blocks end, so under auto on "
                             "timings; what is sampled from stays the same.")
    prefill_chunk: int = option(0, "Tokens of the prompt run at a time; 0: all at once.", min=0)
    stats: bool = option(True, "Say after each text, on standard error, how fast it came.")
    compare: bool = option(False, "Decode plainly, too, and say whether the texts are identical, and how much faster this came. Greedy only.")


@dataclass(frozen=True, kw_only=True)
class Bench(Model):
    drafter: Path = option(MISSING, "Folder of a drafter: a checkpoint of ours or a released one.", show_default=False)
    force: bool = option(False, FORCE)
    prompts: Path | None = option(None, f"What to measure on: {FILES}. Default: the shipped prompts.", show_default=False)
    held_out: float | None = option(None, "Measure on the share of the prompts that `hsprod serve --held-out` of this value keeps from "
                                    "training. Default: 0.1 of the shipped prompts, all of a file's.", min=0.001, max=0.9, show_default=False)
    count: int = option(16, "Prompts, spread evenly over those.", min=1)
    max_new_tokens: int = option(128, "Longest text, in tokens.", min=2)
    block_size: int = option(0, "Slots a block, the known token's included; 0: the drafter's own.", min=0)
    only: str = option("", "Sections to measure, by name and separated by commas. Default: all.", show_default=False)
    llama_bench: Path | None = option(None, "What `llama-bench -o json` (or jsonl) printed: llama.cpp's rates beside ours.", show_default=False)
    out: Path | None = option(None, "Where the record goes, JSON. Default: a new file in the state folder's bench/, whose name is printed.",
                              show_default=False)
    against: Path | None = option(None, "An earlier record: what differs from it, and how the figures moved.", show_default=False)


@dataclass(frozen=True, kw_only=True)
class Eval(Model):
    drafter: Path = option(MISSING, "Folder of a drafter: a checkpoint of ours, one that hstrain import made, or z-lab's.", show_default=False)
    force: bool = option(False, FORCE)
    prompts: list[Path] | None = option(None, f"What to measure on: {FILES}. May be given several times. Default: the shipped prompts.",
                                        show_default=False)
    held_out: float | None = option(None, "Measure on the share of the prompts that `hsprod serve --held-out` of this value keeps from "
                                    "training. Default: 0.1 of the shipped prompts, all of a file's.", min=0.001, max=0.9, show_default=False)
    count: int = option(16, "Prompts of each file: those that hsprod serve takes for its --eval-prompts.", min=1)
    new_tokens: int = option(128, "Tokens decoded for each of them at most.", min=2)
    block_size: int = option(0, "Slots a block, the known token's included; 0: the drafter's own.", min=0)
    json: Path | None = option(None, "Write the report as JSON, too.", show_default=False)


@dataclass(frozen=True, kw_only=True)
class Serve(Answers):
    layers: str = option("auto", "Taps: the target layers to capture, counted from 0, e.g. 1,6,11,16; auto or auto:8 for the uniform rule.")
    bind: str = option(ADDRESS, "Address to listen on for trainers. Off loopback it needs keys, or --insecure.")
    prompts: Path | None = option(None, f"What to answer: {FILES}; with answers if --mode prefill. Default: the shipped prompts.", show_default=False)
    mode: Mode = option("generate", "Let the target answer the prompts, or run it over the given answers (prefill).")
    passes: int = option(1, "How often to go through the prompts; more than one makes sense at a temperature above 0.", min=1)
    max_tokens: int = option(4096, "Longest sequence that is captured, prompt included, in tokens; longer ones are counted and left out.", min=8)
    batch: int = option(16, "Prompts answered together. Captures are computed one by one, so this cannot change them.", min=1)
    mask_token: int | None = option(None, "Id of the drafter's mask token. Default: first embedding row that the tokenizer does not use.",
                                    show_default=False)
    held_out: float = option(0.1, "Share of the prompts, by hash, that is never streamed and measures acceptance.", min=0.0, max=0.9)
    eval_prompts: int = option(16, "Held-out prompts decoded for each checkpoint.", min=1)
    eval_new_tokens: int = option(128, "Tokens decoded for each of them at most.", min=2)
    state_dir: Path = option(state_home() / "hsprod", "Folder for streams, assets and keys.")
    disk_budget: float = option(50.0, "GB on disk for samples that trainers still need; production pauses when it is full.", min=0.001)
    insecure: bool = option(False, "Listen off loopback without keys: anyone on that network can read the stream.")
    keys: Path | None = option(None, "Folder with this box's CURVE key and the list of allowed trainers.", show_default=False)
    metrics_port: int = option(0, "Port of 127.0.0.1 for Prometheus to read; 0: none. Needs the extra 'metrics'.", min=0, max=65535)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = option("INFO", "What is logged.")


@dataclass(frozen=True, kw_only=True)
class Keys:
    keys: Path = option(state_home() / "hsprod" / "keys", "Folder of keys, to be given to `hsprod serve --keys`.")


@dataclass(frozen=True, kw_only=True)
class Allow(Keys):
    key: str = argument("The trainer's public key, 40 characters.")
    comment: str = option("", "Whose it is.")


@dataclass(frozen=True, kw_only=True)
class Status:
    state_dir: Path = option(state_home() / "hsprod", "The state folder of `hsprod serve`.")
    watch: bool = option(False, "Show it live, until Ctrl-C.")
    json: bool = option(False, "Print JSON.")


@dataclass(frozen=True, kw_only=True)
class Forget:
    name: str = argument("The trainer's name, as hsprod status gives it.")
    state_dir: Path = option(state_home() / "hsprod", "The state folder of `hsprod serve`.")


@dataclass(frozen=True, kw_only=True)
class Doctor(Serve):
    json: bool = option(False, "Print JSON.")


def share_held_out(settings: Bench | Eval) -> float | None:
    """The share of the prompts that is measured on, as `hsprod serve` splits them; None: all."""
    return settings.held_out if settings.held_out is not None or settings.prompts else Serve.held_out
