"""Runs a command under the system calls and socket families that a unit allows, as systemd would filter them.

`python sandbox.py UNIT COMMAND...`: systemd's own sets (systemd-analyze syscall-filter) through libseccomp, in this process, then exec.
The rest of a unit's sandbox (mounts, devices, users) is not tried here: it takes a running systemd."""
import ctypes
import ctypes.util
import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ALLOW, ERRNO, EQUAL = 0x7FFF0000, 0x00050000, 4      # seccomp.h
LIBRARY = ctypes.util.find_library("seccomp") or "libseccomp.so.2"


class Compare(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def members(name: str) -> set[str]:
    """System calls of a set, those of the sets in it included."""
    if not name.startswith("@"):
        return {name}
    text = subprocess.run(["systemd-analyze", "syscall-filter", "--no-pager", name], capture_output=True, text=True, check=True).stdout
    words = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()[1:] if line.startswith("    ") and "#" not in line]
    return set().union(*map(members, words)) if words else set()


def allowed(values: list[str]) -> set[str]:
    """SystemCallFilter= lines -> the calls that are left."""
    left: set[str] = set()
    for value in values:
        names = set().union(*map(members, value.removeprefix("~").split()))
        left = left - names if value.startswith("~") else left | names
    return left


def settings(unit: Path, key: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.read_text().splitlines() if line.startswith(f"{key}=")]


def confine(calls: set[str], families: list[str]) -> None:
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ERRNO | errno.EPERM))
    for name in sorted(calls - {"socket"}):
        if (number := library.seccomp_syscall_resolve_name(name.encode())) >= 0:
            library.seccomp_rule_add_array(context, ALLOW, number, 0, None)
    number = library.seccomp_syscall_resolve_name(b"socket")
    for family in families:
        equal = Compare(0, EQUAL, getattr(socket, family), 0)
        library.seccomp_rule_add_array(context, ALLOW, number, 1, ctypes.byref(equal))
    if library.prctl(38, 1, 0, 0, 0) or library.seccomp_load(context):       # no new privileges
        raise OSError("the filter was not loaded")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    confine(allowed(settings(path, "SystemCallFilter")), settings(path, "RestrictAddressFamilies")[-1].split())
    os.execvp(sys.argv[2], sys.argv[2:])
