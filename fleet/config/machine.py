"""What a figure was measured on: processor, cores, and the vector instructions that torch uses on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

_AVX512 = frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl"))
_LEVELS = ("SSE", "AVX2", "AVX-512", "AVX-512 with bfloat16")


def describe_machine() -> str:
    """Such as `AMD EPYC, 2 cores, AVX-512 with bfloat16`. Two processors of one name may differ in the last."""
    model, flags = _read_cpuinfo()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [model, f"{cores} cores", vector_instructions(flags, os.environ)]
    return ", ".join(part for part in parts if part)


def vector_instructions(flags: Iterable[str], environment: Mapping[str, str]) -> str:
    """What torch's own kernels and oneDNN use, '' where that is not known (no x86 processor).

    `flags`: as /proc/cpuinfo names them. ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA of `environment` forbid some.
    """
    there = set(flags)
    if "sse2" not in there:
        return ""
    level = 1 if {"avx2", "fma"} <= there else 0
    if level and there >= _AVX512:
        level = 3 if "avx512_bf16" in there else 2
    allowed = {"default": 0, "avx2": 1}.get(environment.get("ATEN_CPU_CAPABILITY", "").lower(), 3)
    kernels, onednn = min(level, allowed), min(level, _onednn_allows(environment.get("ONEDNN_MAX_CPU_ISA", "").upper()))
    if min(kernels, 2) == min(onednn, 2):
        # only oneDNN has what bfloat16 needs
        return _LEVELS[onednn]
    return f"{_LEVELS[min(kernels, 2)]} (oneDNN: {_LEVELS[onednn]})"


def _onednn_allows(most: str) -> int:
    if most.startswith("AVX512"):
        return 2 if most in ("AVX512_CORE", "AVX512_CORE_VNNI") else 3
    if most.startswith("AVX2"):
        return 1
    return 0 if most in ("SSE41", "AVX") else 3


def _read_cpuinfo() -> tuple[str, list[str]]:
    """Name and flags of the first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    fields = dict(line.split(":", 1) for line in reversed(text.splitlines()) if ":" in line)
    found = {name.strip(): value.strip() for name, value in fields.items()}
    return found.get("model name") or platform.processor() or platform.machine(), found.get("flags", "").split()
