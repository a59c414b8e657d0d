"""Spellings of a dtype on the command line, without typer, which the plain bench does not need."""

from __future__ import annotations

# Each dtype's name in torch, and its other spellings.
DTYPES = {
    "float16": ("fp16", "f16", "half"),
    "bfloat16": ("bf16",),
    "float32": ("fp32", "f32"),
    "float64": ("fp64", "f64"),
}
_NAMES = {spelling: name for name, others in DTYPES.items() for spelling in (name, *others)}


def dtype_name(text: str) -> str | None:
    """Return torch's name of the dtype ``text``, ignoring case and "torch."; None if unknown."""
    return _NAMES.get(text.strip().lower().removeprefix("torch."))
