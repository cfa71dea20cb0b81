"""What a doctor found, and facts of a box that both daemons need.  A verdict is a pure function of facts, so that boxes which
are not here (ROCm, CUDA, a Strix Halo) are judged in tests.

torch is asked in a process of its own: some builds crash where they first touch a GPU, and that is a finding, not an end."""
from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

GIB = 1 << 30
PATIENCE = 180.0             # seconds for torch to start and multiply two matrices on the GPU; a first start compiles
PROBE = """
import json, torch
found = {"torch": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda, "gpus": []}
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    a = torch.ones(64, 64, device=f"cuda:{i}", dtype=torch.bfloat16)
    if float((a @ a).float().sum()) != 64.0 ** 3: raise RuntimeError(f"GPU {i} multiplies wrong")
    found["gpus"].append({"name": p.name, "arch": getattr(p, "gcnArchName", f"sm_{p.major}{p.minor}").partition(":")[0], "total": total, "free": free})
print(json.dumps(found))
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
    crash: str = ""                          # what torch said when it could not be asked
    ram: int = 0
    ttm: int | None = None                   # what the kernel lets an AMD GPU take of the RAM
    kfd: bool | None = None                  # /dev/kfd: None where it is not there, else whether we may use it
    nvidia: bool = False                     # /dev/nvidia0 is there
    variables: tuple[str, ...] = ()          # of ADVISED, those that are set


ADVISED = ("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "PYTORCH_CUDA_ALLOC_CONF")


def gather(extra: str) -> Box:
    """extra: of pyproject.toml, producer or trainer."""
    told = torch_says([sys.executable, "-c", PROBE])
    kfd = Path("/dev/kfd")
    return Box(python=sys.version_info[:2], missing=missing(extra), torch=told.get("torch", ""), hip=told.get("hip"), cuda=told.get("cuda"),
               gpus=tuple(Gpu(**gpu) for gpu in told.get("gpus", ())), crash=told.get("crash", ""), ram=ram(), ttm=ttm(),
               kfd=os.access(kfd, os.R_OK | os.W_OK) if kfd.exists() else None, nvidia=Path("/dev/nvidia0").exists(),
               variables=tuple(name for name in ADVISED if os.environ.get(name)))


def torch_says(command: list[str]) -> dict:
    """PROBE's answer, or {"crash": why there is none}."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return {"crash": f"torch does not answer within {PATIENCE:.0f} s"}
    if done.returncode < 0:
        return {"crash": f"torch ended by signal {-done.returncode} where it touches the GPU"}
    if done.returncode:
        return {"crash": (done.stderr.strip().splitlines() or ["torch failed"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


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


def ttm(path: Path = Path("/sys/module/ttm/parameters/pages_limit")) -> int | None:
    try:
        return int(path.read_text()) * 4096
    except (OSError, ValueError):
        return None


# ---- verdicts


def judge_python(box: Box, extra: str) -> list[Finding]:
    version = ".".join(map(str, box.python))
    if box.missing:
        return [Finding("libraries", "wrong", f"Python {version}; not met: {', '.join(box.missing)}", f"pip install 'hsdraft[{extra}]'")]
    return [Finding("libraries", "ok", f"Python {version}, and all that hsdraft[{extra}] asks for")]


def judge_gpu(box: Box, device: str) -> list[Finding]:
    """device: --device."""
    if box.crash and not box.torch:
        groups = "; sudo usermod -aG render,video $USER, then log in again" if box.kfd is False else ""
        return [Finding("GPU", "wrong", box.crash, f"another torch build (some nightlies crash on gfx1151){groups}")]
    build = f"torch {box.torch}, " + (f"ROCm {box.hip}" if box.hip else f"CUDA {box.cuda}" if box.cuda else "for CPUs")
    if box.gpus:
        found = [Finding("GPU", "ok", f"{build}: " + "; ".join(f"{gpu.name}, {gpu.arch}, {gpu.total / GIB:.1f} GiB" for gpu in box.gpus))]
        unset = [name for name in ADVISED if name not in box.variables]
        if box.hip and unset:
            found.append(Finding("environment", "note", f"not set: {', '.join(unset)}", "see systemd/hsprod.env: attention kernels, large allocations"))
        return found
    if device == "cpu":
        return [Finding("GPU", "note", f"{build}; --device cpu is asked for")]
    grade: Grade = "wrong" if device.startswith("cuda") or box.kfd is not None or box.nvidia else "note"
    if box.kfd is False:
        return [Finding("GPU", "wrong", f"{build}; /dev/kfd may not be used by this user", "sudo usermod -aG render,video $USER, then log in again")]
    if box.kfd and not box.hip:
        return [Finding("GPU", grade, f"{build}, and an AMD GPU is here", "install torch for ROCm; pip leaves it alone after that")]
    if box.nvidia and not box.cuda:
        return [Finding("GPU", grade, f"{build}, and an NVIDIA GPU is here", "install torch for CUDA; pip leaves it alone after that")]
    return [Finding("GPU", grade, f"{build}; no GPU is seen: all runs on the CPU", "" if grade == "note" else "check the driver: rocminfo, nvidia-smi")]


def judge_disk(what: str, free: int, used: int, budget: int, option: str = "--disk-budget") -> Finding:
    """Bytes; used of the budget already."""
    left = max(0, budget - used)
    says = f"{free / 1e9:.1f} GB free, {left / 1e9:.1f} GB of the budget of {budget / 1e9:.1f} GB not yet used"
    if free >= left:
        return Finding(what, "ok", says)
    return Finding(what, "wrong", says, f"{option} {max(0.0, (used + free) * 0.9 / 1e9):.1f}, or a larger disk")


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
