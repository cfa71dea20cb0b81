"""What a doctor found, and facts of a box that both daemons need.  A verdict is a pure function of facts, so that boxes which
are not here (ROCm, CUDA, a Strix Halo) are judged in tests.

torch is asked in a process of its own: some builds crash where they first touch a GPU, and that is a finding, not an end."""
from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common import files

GIB = 1 << 30
PATIENCE = 180.0             # seconds for torch to start and multiply two matrices on the GPU; a first start compiles
PROBE = """
import json, torch
print(json.dumps({"torch": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda}), flush=True)
found = []
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    a = torch.ones(64, 64, device=f"cuda:{i}", dtype=torch.bfloat16)
    if float((a @ a).float().sum()) != 64.0 ** 3: raise RuntimeError(f"GPU {i} multiplies wrong")
    arch = getattr(p, "gcnArchName", f"sm_{p.major}{p.minor}").partition(":")[0]
    found.append({"name": p.name, "arch": arch, "total": total, "free": free})
print(json.dumps({"gpus": found}))
"""
Grade = Literal["ok", "note", "wrong"]
COLORS = {"ok": "green", "note": "yellow", "wrong": "bold red"}


@dataclass(frozen=True)
class Finding:
    """fix: a command, or what to do; "" where nothing is wrong.  A note does not fail a box."""

    what: str
    grade: Grade
    says: str
    fix: str = ""


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str                    # gfx1151, sm_86
    total: int                   # bytes, as the runtime sees them
    free: int


@dataclass(frozen=True)
class Box:
    """Facts.  Sizes in bytes; None: not there, or not to be read."""

    python: tuple[int, int]
    missing: tuple[str, ...]                 # requirements of ours that are not met
    torch: str = ""
    hip: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    crash: str = ""                          # why torch, or a GPU under it, could not be asked
    ram: int = 0                             # that Linux has: without what the BIOS sets aside
    ttm: int | None = None                   # what the kernel lets an AMD GPU take of the RAM
    carved: int | None = None                # what the BIOS sets aside for an AMD GPU, or the memory of its own
    kfd: bool | None = None                  # an AMD GPU's /dev/kfd and /dev/dri/renderD*: None where kfd is not there, else whether we may use all
    nvidia: bool = False                     # /dev/nvidia0 is there
    variables: tuple[str, ...] = ()          # of ADVISED, those that are set


ADVISED = {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}       # docs/strix-halo.md


def gather(extra: str) -> Box:
    """extra: of pyproject.toml, producer or trainer."""
    told = torch_says([sys.executable, "-c", PROBE])
    return Box(python=sys.version_info[:2], missing=missing(extra), torch=told.get("torch", ""), hip=told.get("hip"), cuda=told.get("cuda"),
               gpus=tuple(Gpu(**gpu) for gpu in told.get("gpus", ())), crash=told.get("crash", ""), ram=ram(), ttm=ttm(), carved=carved(),
               kfd=usable(Path("/dev")), nvidia=Path("/dev/nvidia0").exists(), variables=tuple(name for name in ADVISED if os.environ.get(name)))


def torch_says(command: list[str]) -> dict:
    """PROBE's answer; with {"crash": why} where it did not get to its end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        code, out, err = done.returncode, done.stdout, done.stderr
        why = f"torch ended by signal {-code} where it touches the GPU" if code < 0 else (err.strip().splitlines() or ["torch failed"])[-1][:300]
    except subprocess.TimeoutExpired as error:
        code, why = 1, f"torch does not answer within {PATIENCE:.0f} s"
        out = (error.stdout or b"").decode(errors="replace")
    told: dict = {"crash": why} if code else {}
    for line in out.splitlines():
        if line.startswith("{"):                             # a library may greet on standard output
            told |= json.loads(line)
    return told


def usable(dev: Path) -> bool | None:
    """Whether we may use an AMD GPU: the compute node and the render nodes; None where there is none."""
    if not (dev / "kfd").exists():
        return None
    return all(os.access(node, os.R_OK | os.W_OK) for node in (dev / "kfd", *(dev / "dri").glob("renderD*")))


def missing(extra: str) -> tuple[str, ...]:
    """Of what pyproject.toml asks for, with that extra: what is not installed, or in another version."""
    try:
        from packaging.requirements import Requirement
        asked = [Requirement(line) for line in importlib.metadata.requires("hsdraft") or ()]
    except ImportError:                                      # packaging comes with transformers and with matplotlib
        return ("packaging",)
    found = []
    for need in asked:
        if need.marker is None or (need.marker.evaluate({"extra": extra}) and not need.marker.evaluate({"extra": ""})):
            try:
                if not need.specifier.contains(importlib.metadata.version(need.name), prereleases=True):
                    found.append(f"{need.name}{need.specifier} (here: {importlib.metadata.version(need.name)})")
            except importlib.metadata.PackageNotFoundError:
                found.append(f"{need.name}{need.specifier}")
    return tuple(found)


def ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def carved(cards: Path = Path("/sys/class/drm")) -> int | None:
    """Of the AMD GPU that has most."""
    found = []
    for path in cards.glob("card*/device/mem_info_vram_total"):
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):
            continue
    return max(found, default=None)


def ttm(path: Path = Path("/sys/module/ttm/parameters/pages_limit")) -> int | None:
    try:
        return int(path.read_text()) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


# ---- verdicts


ROCM = ("torch for ROCm first, from your ROCm's own index (https://download.pytorch.org/whl/ has one for each version), "
        "as pip would fetch CUDA's")
GROUPS = "sudo usermod -aG render,video $USER, then log in again"


def judge_python(box: Box, extra: str) -> list[Finding]:
    """pip takes torch from PyPI, which is CUDA's: on a box with an AMD GPU it has to be there before."""
    version = ".".join(map(str, box.python))
    if box.missing:
        before = f"{ROCM}; then " if box.kfd is not None and not box.nvidia and any(need.startswith("torch") for need in box.missing) else ""
        return [Finding("libraries", "wrong", f"Python {version}; not met: {', '.join(box.missing)}",
                        f"{before}{sys.executable} -m pip install 'hsdraft[{extra}]'")]
    return [Finding("libraries", "ok", f"Python {version}, and all that hsdraft[{extra}] asks for")]


def index_of(device: str) -> int:
    """Which GPU --device means; of one that is none, the first."""
    number = device.rpartition("cuda:")[2]
    return int(number) if number.isdigit() else 0


def judge_gpu(box: Box, device: str) -> list[Finding]:
    """device: --device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        return [Finding("GPU", "wrong", f"--device {device} is none", "--device auto, cpu, cuda or cuda:1")]
    if not box.torch:
        return [Finding("GPU", "wrong", f"torch cannot be asked: {box.crash}", "mend the libraries first")]
    build = f"torch {box.torch}, " + (f"ROCm {box.hip}" if box.hip else f"CUDA {box.cuda}" if box.cuda else "for CPUs")
    if device == "cpu":
        return [Finding("GPU", "note", f"{build}; --device cpu is asked for")]
    if box.crash:
        return [Finding("GPU", "wrong", f"{build}: {box.crash}", crash_fix(box))]
    if box.gpus and index_of(device) >= len(box.gpus):
        return [Finding("GPU", "wrong", f"{build}: --device {device}, and GPUs seen: {len(box.gpus)}", "--device cuda:0, or auto")]
    if not box.gpus:
        return [unseen(box, device, build)]
    found = [Finding("GPU", "ok", f"{build}: " + "; ".join(f"{gpu.name}, {gpu.arch}, {gpu.total / GIB:.1f} GiB" for gpu in box.gpus))]
    unset = [name for name in ADVISED if name not in box.variables]
    if box.hip and unset:
        found.append(Finding("environment", "note", f"not set: {', '.join(unset)} (attention kernels, large allocations)",
                             "export " + " ".join(f"{name}={ADVISED[name]}" for name in unset)))
    return found


def crash_fix(box: Box) -> str:
    if box.kfd is False:
        return GROUPS
    if box.hip:
        return "another torch for ROCm (some nightlies crash on gfx1151); --device cpu runs without"
    return "a torch whose CUDA your driver knows: nvidia-smi shows the newest one; --device cpu runs without"


def unseen(box: Box, device: str, build: str) -> Finding:
    """No GPU is seen: wrong where one is wanted or plugged in."""
    if box.kfd is False and not box.nvidia:
        return Finding("GPU", "wrong", f"{build}; /dev/kfd and /dev/dri/renderD* may not be used by this user", GROUPS)
    if box.kfd is not None and not box.hip and not box.nvidia:
        return Finding("GPU", "wrong", f"{build}, and an AMD GPU is here", ROCM)
    if box.nvidia and not box.cuda:
        return Finding("GPU", "wrong", f"{build}, and an NVIDIA GPU is here", "a torch for CUDA (https://pytorch.org/get-started/locally)")
    if box.kfd is None and not box.nvidia and device == "auto":
        return Finding("GPU", "note", f"{build}; no GPU is seen: all runs on the CPU")
    driver = "nvidia-smi" if box.nvidia else "rocminfo" if box.kfd is not None else "rocminfo (AMD) or nvidia-smi (NVIDIA)"
    return Finding("GPU", "wrong", f"{build}; no GPU is seen", f"{driver} must list it: mend the driver first")


def judge_disk(what: str, free: int, used: int, budget: int) -> Finding:
    """Bytes; used of the budget already."""
    says = f"{free / 1e9:.1f} GB free, and --disk-budget {budget / 1e9:.1f} GB leaves {max(0, budget - used) / 1e9:.1f} GB to be filled"
    fits = files.fits(free, used, budget)
    return Finding(what, "ok", says) if fits is None else Finding(what, "wrong", says, f"--disk-budget {fits / 1e9:.1f}, or a larger disk")


def disk_free(folder: Path) -> int:
    """Of the nearest folder that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


# ---- what a person sees


def show(command: str, findings: list[Finding], *, as_json: bool) -> int:
    """Print; 1 where something is wrong."""
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        wrong = sum(finding.grade == "wrong" for finding in findings)
        title = f"{command} on {platform.node()}: " + (f"{wrong} to mend" if wrong else "all right")
        table = Table(title=title, title_justify="left", title_style="bold red" if wrong else "bold green", show_header=False, min_width=72)
        for finding in findings:
            says = Text(finding.says)
            if finding.fix:
                says.append(f"\n-> {finding.fix}", style="bold")
            table.add_row(Text(finding.grade, style=COLORS[finding.grade]), finding.what, says)
        Console(file=sys.stdout).print(table)
    return int(any(finding.grade == "wrong" for finding in findings))
