"""What a measurement ran on."""

from __future__ import annotations

import platform
import re
from pathlib import Path

# Instruction sets that decide how fast matrix products are: times of machines that differ in them do not compare.
CPU_FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
INT8_FEATURES = ("avx_vnni", "avx512_vnni", "amx_int8")  # with one of these, int8 products are fast and do not overflow


def _cpuinfo(field: str) -> str | None:
    path = Path("/proc/cpuinfo")
    found = re.search(rf"^{field}\s*:\s*(.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else None


def cpu_features() -> tuple[str, ...]:
    """Instruction sets of this CPU that matter for speed; empty where the system does not say."""
    flags = (_cpuinfo("flags") or "").split()
    return tuple(name for name in CPU_FEATURES if name in flags)


def int8_features() -> tuple[str, ...]:
    """Those of them that make int8 fast."""
    return tuple(name for name in cpu_features() if name in INT8_FEATURES)


def describe_hardware() -> str:
    """CPU or accelerator and the versions that matter, fit for a file name."""
    import timm
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        name = _cpuinfo("model name") or platform.processor() or platform.machine()
    words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    return f"{words}_torch-{torch.__version__.partition('+')[0]}_timm-{timm.__version__}"
