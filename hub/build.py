"""tilewise as a kernel of the Hugging Face Hub: a folder that `kernels.get_local_kernel` loads.

    python hub/build.py build/hub-kernel

What the Hub asks for (docs/source/kernel-requirements.md of huggingface/kernels): a folder for each variant, here
build/torch-cpu and build/torch-cuda; imports within it are relative, for a kernel is loaded from any path, several
versions of it in one process; operators are in the namespace of the kernel's id, which no other version has. So the
sources are copied, and each place that says ``tilewise`` to Python or to PyTorch says the id. What imports more than
torch and triton, and what no call needs, stays behind.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tilewise"
LEFT_OUT = (
    "__main__.py", "integrations/models.py", "integrations/packed.py", "integrations/position_bias.py",
    "integrations/transformers.py", "layouts", "py.typed",
)  # fmt: skip
BACKENDS: dict[str, dict[str, object]] = {
    "cpu": {"type": "cpu"},
    "cuda": {"type": "cuda", "archs": ["8.0+PTX"]},  # and later ones
}
VERSION = 0  # by the Hub's convention not yet for production; of 1 and later, higher where the API is another
# What says the package's name, but for imports: modules by name, and the operators' namespace.
NAMES = (
    (re.compile(r'(import_module\(f?")tilewise\.'), r"\1{id}."),
    (re.compile(r'^(    "\w+": ")tilewise\.', re.MULTILINE), r"\1{id}."),
    (re.compile(r'(f?")tilewise::'), r"\1{id}::"),
    (re.compile(r'Library\("tilewise"'), 'Library("{id}"'),
    (re.compile(r"torch\.ops\.tilewise\b"), "torch.ops.{id}"),
)


def sources() -> dict[str, str]:
    """Path below the package -> text, of what a kernel has."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not any(name == x or name.startswith(f"{x}/") for x in LEFT_OUT):
            found[name] = path.read_text(encoding="utf-8")
    return found


def relative(name: str, source: str) -> str:
    """With relative imports of the package's own modules."""
    lines = source.splitlines(keepends=True)
    dots = "." * (name.count("/") + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tilewise":
            below = node.module.removeprefix("tilewise").removeprefix(".")
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"from {node.module} import", f"from {dots}{below} import", 1)
        elif isinstance(node, ast.Import) and node.names[0].name.split(".")[0] == "tilewise":
            module, _, last = node.names[0].name.removeprefix("tilewise").removeprefix(".").rpartition(".")
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"import {node.names[0].name}", f"from {dots}{module} import {last}")
    return "".join(lines)


def renamed(name: str, source: str, id: str) -> str:
    source = relative(name, source)
    for pattern, becomes in NAMES:
        source = pattern.sub(becomes.replace("{id}", id), source)
    return source


def write(folder: Path) -> dict[str, Path]:
    """The repository of the kernel, in place of what was there. Returns the folder of each backend."""
    shutil.rmtree(folder, ignore_errors=True)
    texts = sources()
    content = hashlib.sha1("".join(f"{name}\n{text}" for name, text in texts.items()).encode()).hexdigest()[:10]
    variants = {backend: folder / "build" / f"torch-{backend}" for backend in BACKENDS}
    for backend, variant in variants.items():
        id, digests = f"_tilewise_{backend}_{content}", {}
        for name, text in texts.items():
            data = renamed(name, text, id).encode()
            digests[name] = base64.b64encode(hashlib.sha256(data).digest()).decode()
            path = variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        metadata = {
            "id": id, "name": "tilewise", "version": VERSION, "license": "Apache-2.0", "python-depends": [],
            "backend": BACKENDS[backend], "digest": {"algorithm": "sha256", "files": digests},
        }  # fmt: skip
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    shutil.copy(Path(__file__).with_name("README.md"), folder)
    shutil.copy(ROOT / "LICENSE", folder)
    return variants


if __name__ == "__main__":
    for path in write(Path(sys.argv[1])).values():
        print(path)
