"""Settings of the trainer's commands: each option once, with its default and unit; and the recipe by target size."""
from __future__ import annotations

import platform
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from common.settings import argument, option, state_home
from trainer.arms import choices

CACHE_MB = 2048
ADDRESS = "tcp://127.0.0.1:5757"


Kind = Literal["adamw", "muon"]


def _one_of(field: str) -> str:
    return ", ".join(choices(field))


@dataclass(frozen=True, kw_only=True)
class Run:
    arm: str = option("ce_causal", "The arm to train; hstrain arms lists them.")
    producer: str | None = option(None, f"Address of hsprod serve. Default: {ADDRESS}, and none with --from.", show_default=False)
    stored: Path | None = option(None, "Train from this stored stream instead of a live one: the state folder of a box that has received it, or "
                                 "its store. Acceptance is measured where --producer is given, too.", named="--from", show_default=False)
    samples: int | None = option(None, "With --from: the stream's first so many samples. Default: all that are there when the run begins.",
                                 min=1, show_default=False)
    loss: str | None = option(None, f"The arm with another loss: {_one_of('loss')}. This and the seven options below, and --block-size, make "
                              "an arm of its own, whose name says so.", show_default=False)
    attention: str | None = option(None, f"The arm with another attention inside the block: {_one_of('attention')}.", show_default=False)
    corruption: str | None = option(None, f"The arm with other slots masked: {_one_of('corruption')}.", show_default=False)
    weights: str | None = option(None, f"The arm with other weights of slots: {_one_of('weights')}.", show_default=False)
    gamma: float | None = option(None, "Decay of exp weights, in slots. Default: by block size (7 for 16).", show_default=False)
    alpha: float | None = option(None, "Floor of dpace's confidences, 0 to 1.", show_default=False)
    all_sliding: bool | None = option(None, "Whether the last layer slides, too.", show_default=False)
    draft_vocab: int | None = option(None, "Tokens that may be drafted, the commonest of the first samples; the head is cut to them. Default: all.",
                                     show_default=False)
    init: Path | None = option(None, "Begin with this drafter's weights and shape: a run of ours, a checkpoint, or what hstrain import reads. Attention "
                               "stays the arm's. Default: fresh weights.", show_default=False)
    init_force: bool = option(False, "Begin with it though it was trained on another target's data; its shape has to fit all the same.")
    seed: int = option(0, "Seed of the drafter's start and of anchors.", min=0, max=2 ** 31 - 1)
    steps: int | None = option(None, "Length of the run, in optimisation steps. Default: by the target's size (see docs).", min=1, show_default=False)
    tokens: int | None = option(None, "Length of the run in tokens trained on, re-reads included, instead of --steps; turned into "
                                "steps with the first samples' mean length.", min=1, show_default=False)
    eval_every: int = option(500, "Send a checkpoint for real acceptance every so many steps, and at the end.", min=1)
    eval_all: bool = option(False, "Have every checkpoint measured, and wait for it at the end, instead of the newest whenever the producer is free.")
    run_dir: Path | None = option(None, "Folder of this run. Default: runs/ARM-sSEED in the state folder. Re-running resumes it.", show_default=False)
    state_dir: Path = option(state_home() / "hstrain", "Folder of the store, assets, runs and keys of this box.")
    name: str = option(platform.node() or "trainer", "This box's name at the producer, which keeps samples until it has them.")
    replay: int = option(3, "Re-reads of earlier samples for each fresh one.", min=0)
    sequences: int | None = option(None, "Sequences in one step. Default: by the target's size.", min=1, show_default=False)
    anchors: int | None = option(None, "Anchors (blocks) drawn from one sequence at most. Default: by the target's size.", min=1, show_default=False)
    max_tokens: int | None = option(None, "Longest sequence in tokens; what is longer is cut there and counted. Default: by the target's size.",
                                    min=16, show_default=False)
    optimizer: Kind | None = option(None, "adamw, as in the DFlash paper, or muon (torch's, on matrices). Default: by the target's size.",
                                             show_default=False)
    lr: float | None = option(None, "Peak learning rate. Default: by the target's size.", show_default=False)
    layers: int | None = option(None, "Decoder layers of the drafter. Default: by the target's size.", min=1, show_default=False)
    block_size: int | None = option(None, "Positions per block, the known token included. Default: by the target's size.", show_default=False)
    window: int | None = option(None, "Sliding window in tokens. Default: by the target's size.", min=1, show_default=False)
    device: str = option("auto", "cuda (CUDA and ROCm alike), cpu, or auto.")
    attend: Literal["auto", "flex", "grouped", "dense"] = option("auto", "How a step's blocks attend: flex (compiled, a GPU's), grouped (a CPU's), "
                                                                 "dense (every key under one mask). The numbers are the same.")
    shard: bool = option(False, "Under torchrun: each rank holds a share of weights, gradients and optimiser state, where the whole does not "
                                "fit on one card (FSDP).")
    threads: int = option(0, "CPU threads for torch; 0: torch's own choice.", min=0)
    disk_budget: float = option(200.0, "GB on disk for this box's store; receiving pauses when it is full.", min=0.001)
    cache: int = option(CACHE_MB, "MB of decoded samples that are kept in memory, for those that are read again.", min=1)
    credit: int = option(256, "MB of samples that may be on their way at once.", min=1)
    keys: Path | None = option(None, "Folder with this box's CURVE key and the producer's public key.", show_default=False)
    metrics_port: int = option(0, "Port of 127.0.0.1 for Prometheus to read; 0: none. Runs at the same time need one each (a sweep of --jobs 2 "
                               "takes this and the next), and the extra 'metrics'.", min=0, max=65535)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = option("INFO", "What is logged.")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    arms: str = option("ce_causal", "Arms, as in a,b,c; hstrain arms lists them.")
    seeds: str = option("0,1,2", "Seeds, as in 0,1,2; each arm is trained with each.")
    jobs: int = option(1, "Runs at once, each a process of its own; the CPU's threads are divided among them.", min=1)
    sweep_dir: Path | None = option(None, "Folder of the sweep. Default: sweep in the state folder. The same line again goes on where it was.",
                                    show_default=False)
    options: list[str] | None = argument("Options of hstrain run, --from and --steps among them, for each of the runs.", default=None)


@dataclass(frozen=True, kw_only=True)
class Report:
    runs: list[Path] = argument("Run folders, or folders of runs (a sweep's).")
    out: Path | None = option(None, "FILE.png for the charts, or a folder for report.png, report.html and report.json. Default: report.png, unless "
                              "--html or --json is given.", show_default=False)
    html: Path | None = option(None, "One self-contained page with charts, tables and a summary in words.", show_default=False)
    json: bool = option(False, "Print JSON instead of tables.")


@dataclass(frozen=True, kw_only=True)
class Memory:
    arm: str = option("ce_causal", "The arm to train; hstrain arms lists them.")
    loss: str | None = option(None, f"The arm with another loss: {_one_of('loss')}.", show_default=False)
    draft_vocab: int | None = option(None, "Tokens that may be drafted. Default: all.", show_default=False)
    block_size: int | None = option(None, "Positions per block. Default: by the target's size.", min=2, show_default=False)
    target_config: Path | None = option(None, "The target's config.json, or its folder. Default: the next four options.", show_default=False)
    hidden: int = option(2048, "Width of the target. The defaults are Qwen3.6-35B-A3B's.", min=1)
    target_layers: int = option(40, "Its layers.", min=1)
    vocab: int = option(248320, "Rows of its embedding.", min=2)
    tied: bool = option(False, "Its embedding and its output head are one tensor.")
    taps: int = option(8, "Layers that are captured.", min=1)
    layers: int | None = option(None, "Decoder layers of the drafter. Default: by the target's size.", min=1, show_default=False)
    sequences: int | None = option(None, "Sequences in one step. Default: by the target's size.", min=1, show_default=False)
    anchors: int | None = option(None, "Anchors (blocks) in one sequence. Default: by the target's size.", min=1, show_default=False)
    max_tokens: int | None = option(None, "Longest sequence in tokens. Default: by the target's size.", min=16, show_default=False)
    optimizer: Kind | None = option(None, "adamw or muon. Default: by the target's size.", show_default=False)
    device: Literal["cuda", "cpu"] = option("cuda", "Where the step runs: bf16 on a GPU, fp32 on a CPU.")
    vram: float = option(16.0, "The card's memory, in GiB.", min=1.0)


@dataclass(frozen=True, kw_only=True)
class Export:
    run: Path = argument("A run's folder (its newest checkpoint is taken), a checkpoint's, or any drafter that hstrain import reads.")
    out: Path = option(MISSING, "What to write: a folder, or the .gguf file. Nothing may be there yet.")
    format: Literal["z-lab", "speculators", "gguf"] = option(MISSING, "z-lab: its own code, vLLM, SGLang. speculators: that library, vLLM. gguf: llama.cpp.")
    quant: Literal["bf16", "f16", "q8_0"] = option("bf16", "How weights are kept; q8_0 in a GGUF only.")
    target: Path | None = option(None, "The target's GGUF, or its folder. Needed for a GGUF (its tokenizer), and for a drafter with a draft vocabulary "
                                 "in a GGUF or for speculators (rows of its output head).", show_default=False)


@dataclass(frozen=True, kw_only=True)
class Import:
    path: Path = argument("A drafter's folder in z-lab's or speculators' format, or its GGUF.")
    out: Path = option(MISSING, "The folder to write, in the format of our checkpoints. Nothing may be there yet.")
    target_layers: int | None = option(None, "Decoder layers of the target, where the file does not say (speculators, GGUF).", min=1, show_default=False)


@dataclass(frozen=True, kw_only=True)
class Keys:
    keys: Path = option(state_home() / "hstrain" / "keys", "Folder of keys, to be given to `hstrain run --keys`.")


@dataclass(frozen=True, kw_only=True)
class Trust(Keys):
    key: str = argument("The producer's public key, 40 characters.")


@dataclass(frozen=True, kw_only=True)
class Status:
    state_dir: Path = option(state_home() / "hstrain", "The state folder of `hstrain run`.")
    watch: bool = option(False, "Show it live, until Ctrl-C.")
    json: bool = option(False, "Print JSON.")


@dataclass(frozen=True, kw_only=True)
class Doctor(Run):
    json: bool = option(False, "Print JSON.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a drafter of one size is trained, unless the command line says otherwise."""

    steps: int
    sequences: int
    anchors: int
    max_tokens: int
    optimizer: Kind
    lr: float


def recipe_for(hidden_size: int) -> Recipe:
    """From 1024 wide: the DFlash paper's (AdamW 6e-4, 512 anchors, 3072 tokens).  Below: Muon and many small steps, which
    leave the early plateau sooner (LOG.md)."""
    if hidden_size >= 1024:
        return Recipe(steps=20_000, sequences=2, anchors=512, max_tokens=3072, optimizer="adamw", lr=6e-4)
    return Recipe(steps=2_000, sequences=8, anchors=24, max_tokens=1024, optimizer="muon", lr=0.02)
