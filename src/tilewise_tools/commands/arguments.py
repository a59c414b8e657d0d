"""Parsers for the commands' options; an invalid value raises a typer.BadParameter with the option.

Commands declare options as text and parse them here, so that spellings and errors are uniform.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import typer

from tilewise_tools.commands.spelling import DTYPES, dtype_name

LARGEST = 1 << 58  # elements of a tensor: with float64, the number of bytes still fits 64 bits
Choice = TypeVar("Choice", bound=StrEnum)


class Device(StrEnum):
    """Device type on which a command runs."""

    CPU = "cpu"
    CUDA = "cuda"


def mistake(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=option)


def names(text: str, option: str) -> tuple[str, ...]:
    """Split ``text`` at its commas; return () if it is empty."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not found:
        raise mistake(option, f"names separated by commas are needed, got {text!r}")
    return found


def choice(text: str, option: str, allowed: type[Choice]) -> Choice:
    """Return the member of ``allowed`` with the value ``text``, ignoring case."""
    for member in allowed:
        if text.strip().lower() == member.value:
            return member
    raise mistake(option, f"must be one of {', '.join(allowed)}, got {text!r}")


def dtype(text: str, option: str) -> str:
    """Return torch's name of a float dtype in any of its spellings."""
    found = dtype_name(text)
    if found is None:
        known = ", ".join(f"{name} ({others[0]})" for name, others in DTYPES.items())
        raise mistake(option, f"must be one of {known}, got {text!r}")
    return found


def number(text: str, option: str, least: float | None = None) -> float:
    try:
        found = float(text)
    except ValueError:
        raise mistake(option, f"a number is needed, got {text!r}") from None
    if least is not None and not found >= least:  # also rejects a NaN
        raise mistake(option, f"must be {least:g} or more, got {text!r}")
    return found


def whole(text: str, option: str, least: int, most: int | None = None) -> int:
    """Return the integer ``text`` if it is from ``least`` to ``most``."""
    found = int(text) if re.fullmatch(r"\s*-?[0-9]{1,4000}\s*", text) else None
    if found is None or found < least or (most is not None and found > most):
        limits = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise mistake(option, f"a whole number {limits} is needed, got {text!r}")
    return found


def shape(text: str, option: str, dims: int | None = None, example: str = "4,16,4096,128") -> tuple[int, ...]:
    """Parse sizes separated by commas or by x, with or without brackets: ``dims`` of them, or up to four."""
    plain = re.sub(r"^([(\[])(.*)([)\]])$", r"\2", text.strip())
    parts = [part.strip() for part in re.split(r"[,xX×]", plain)]
    if not all(re.fullmatch(r"-?[0-9]+", part) for part in parts):
        raise mistake(option, f"sizes separated by commas, such as {example}, are needed, got {text!r}")
    if any(part.startswith("-") for part in parts):
        raise mistake(option, f"a size cannot be negative, got {text!r}")
    if len(parts) > 4 or (dims is not None and len(parts) != dims):
        needed = "at most 4" if dims is None else str(dims)
        raise mistake(option, f"{needed} sizes, such as {example}, are needed, got {len(parts)}: {text!r}")
    sizes = [int(part) if len(part) <= 18 else LARGEST + 1 for part in parts]
    if math.prod(max(size, 1) for size in sizes) > LARGEST:  # strides count a size of 0 as 1
        raise mistake(option, f"at most 2**58 elements are allowed, got {text!r}")
    return tuple(sizes)


def check_writable(path: Path, option: str) -> None:
    """Raise a mistake unless ``path`` can be created or overwritten; called before long runs."""
    if str(path) == "-":
        raise mistake(option, "the name of a file is needed, got '-': standard output has the text")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise mistake(option, f"there is no folder {folder}")
    if folder == Path("/dev") or (path.exists() and not path.is_file()):  # a device or pipe would be replaced
        raise mistake(option, f"cannot write {path}: it is {'a folder' if path.is_dir() else 'no regular file'}")
    if not os.access(folder, os.W_OK):  # the file is written to a temporary name there, then renamed
        raise mistake(option, f"cannot write {path}: the folder {folder} cannot be written into")


def make_folder(path: Path, option: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise mistake(option, f"cannot make the folder {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise mistake(option, f"cannot write into the folder {path}")


# Errors of the library


def told(error: Exception, options: Mapping[str, str]) -> typer.BadParameter:
    """Convert an error about Python arguments into one that names the command's options.

    Args:
        error: an error of tilewise, which begins with the names of the arguments at fault: "k, v: ...". An error
            without such names concerns the whole call.
        options: the option of each argument.
    """
    head, colon, rest = str(error).partition(": ")
    words = [re.fullmatch(r"(\w+)(?:\[(\w+)\])?", name) for name in head.split(", ")]
    found = [(word[1], word[2]) for word in words if word is not None and word[1] in options]
    if not colon or len(found) < len(words):
        return typer.BadParameter(in_options(str(error), options))
    hint = " / ".join(dict.fromkeys(options[name] for name, _ in found))
    axes = ", ".join(axis for _, axis in found if axis)
    return mistake(hint, f"{axes} {in_options(rest, options)}".lstrip())


def in_options(text: str, options: Mapping[str, str]) -> str:
    """Rewrite Python arguments in ``text`` as options.

    deterministic=True becomes --deterministic, limits=(a, b) --limits a,b, q's --shape's, and None none.
    """
    named = rf"(?<![-\w])({'|'.join(map(re.escape, options))})"

    def option(found: re.Match[str]) -> str:
        value = found[2] or ""
        if value in ("", "True"):
            return options[found[1]]
        return f"{options[found[1]]} {re.sub(r'[()]|(?<=,) ', '', value)}"

    text = re.sub(rf"{named}=(True\b|\([^()]*\)|[\w.'-]+)?", option, text)
    text = re.sub(rf"{named}\[:, None, None, :\]", lambda found: f"{options[found[1]]} B,1,1,N", text)
    text = re.sub(rf"{named}\[:, None\]", lambda found: f"{options[found[1]]} B,1,M,N", text)
    text = re.sub(rf"{named}\[(\w+)\]=", lambda found: f"{options[found[1]]}'s {found[2]} ", text)
    text = re.sub(rf"{named}'s\b", lambda found: f"{options[found[1]]}'s", text)
    return re.sub(r"\bNone\b", "none", text)


# Packages


def missing_packages(command: str, distributions: Iterable[str], extra: str) -> str:
    """Return the message for missing distributions; tilewise's extras are installed from a checkout."""
    wanted = f"in a checkout of tilewise, pip install '.[{extra}]'"
    return f"{command}: not installed: {', '.join(distributions)}: {wanted}"
