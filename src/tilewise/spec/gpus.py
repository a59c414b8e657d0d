"""Names of NVIDIA's GPUs and their compute capabilities. Source: https://developer.nvidia.com/cuda/gpus."""

from __future__ import annotations

import re

_NAMES = {
    (7, 0): ("V100",),
    (7, 5): ("T4",),
    (8, 0): ("A100", "A30"),
    (8, 6): ("A10", "A40", "RTX A6000", "RTX 3060", "RTX 3070", "RTX 3080", "RTX 3090"),
    (8, 9): ("L4", "L40", "L40S", "RTX 4060", "RTX 4070", "RTX 4080", "RTX 4090"),
    (9, 0): ("H100", "H200", "GH200"),
    (10, 0): ("B200", "GB200"),
    (10, 3): ("B300", "GB300"),
    (12, 0): ("RTX 5060", "RTX 5070", "RTX 5080", "RTX 5090"),
    (12, 1): ("GB10",),
}


def gpu_key(text: str) -> str:
    """Return a name in the form in which names are compared: "RTX 4090", "rtx-4090" and "rtx4090" are one."""
    return re.sub(r"[\s_-]", "", text.lower()).removeprefix("nvidia").removeprefix("geforce")


CAPABILITIES = {gpu_key(name): capability for capability, names in _NAMES.items() for name in names}


def compute_capability(device: str) -> tuple[int, int] | None:
    """Return (9, 0) for "sm_90" and "H100", (12, 1) for "sm_121", None for other texts."""
    if not isinstance(device, str):
        return None
    found = re.fullmatch(r"sm_([0-9]{1,2})([0-9])", device)
    return CAPABILITIES.get(gpu_key(device)) if found is None else (int(found[1]), int(found[2]))
