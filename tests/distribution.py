"""Wheels and source distributions as a user gets them: each is installed into an environment of its own and asked.

    python tests/distribution.py build/dist/*

The environment sees torch by a path to this one, from where neither an editable tilewise nor anything else is
installed; nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
PACKAGES = ("tilewise", "tilewise_tools")

# Runs in the environment, away from the repository. Prints each file that is installed.
ASK = """
import re, sys
from importlib import metadata
from pathlib import Path

import torch
import tilewise

about = metadata.distribution("tilewise")
package = Path(tilewise.__file__).parent
assert package.is_relative_to(sys.prefix), package
assert about.version == tilewise.__version__
assert about.metadata["License-Expression"] == "Apache-2.0"
assert about.metadata["Description-Content-Type"] == "text/markdown"
description = about.metadata.get_payload()
assert description.startswith("# tilewise")
assert not re.search(r"\\]\\((?!https?:)", description), "a link that leads nowhere"
(script,) = about.entry_points.select(group="console_scripts")
assert (script.name, script.value) == ("tilewise", "tilewise.__main__:main")
tops = {Path(file).parts[0] for file in about.files if "dist-info" not in str(file)}
assert tops <= {"tilewise", "tilewise_tools", ".."}, tops
for name in dir(tilewise):
    getattr(tilewise, name)
q = torch.randn(1, 2, 5, 8, requires_grad=True)
tilewise.attention(q, q, q, bias=torch.zeros(5), causal=True).sum().backward()
assert q.grad is not None
files = [path for name in tops - {".."} for path in (package.parent / name).rglob("*") if path.is_file()]
print(*(str(path.relative_to(package.parent)) for path in files), sep="\\n")
"""


def check(archive: Path) -> None:
    """Raise where it cannot be installed, or what is installed is not this repository's package."""
    with tempfile.TemporaryDirectory(prefix="tilewise-distribution-") as folder:
        venv.create(folder)
        paths = sysconfig.get_paths(vars={"base": folder, "platbase": folder})
        python = Path(paths["scripts"], "python")
        Path(paths["purelib"], "torch-of-another.pth").write_text(sysconfig.get_path("purelib"))
        # By the pip and the setuptools that are here, too. What is installed here is not looked at, and stays.
        install = [
            sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet",
            "--ignore-installed", "--no-compile", "--no-deps", "--no-index", "--no-build-isolation", archive.resolve(),
        ]  # fmt: skip
        subprocess.run(install, cwd=folder, check=True)
        done = subprocess.run([python, "-I", "-c", ASK], cwd=folder, check=True, capture_output=True, text=True)
    installed = {name for name in done.stdout.splitlines() if "__pycache__" not in name}
    files = [path for name in PACKAGES for path in (SOURCES / name).rglob("*") if path.is_file()]
    ours = {name for name in (str(path.relative_to(SOURCES)) for path in files) if "__pycache__" not in name}
    assert {"tilewise/py.typed", "tilewise/layouts/page.html", "tilewise_tools/py.typed"} < installed
    assert installed == ours, sorted(installed ^ ours)
    print(f"{archive.name}: installed and imported, {len(installed)} files")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(Path(name))
