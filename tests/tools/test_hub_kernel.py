"""`make hub-kernel`: the folder loads without tilewise, beside tilewise, and says what the Hub asks for."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "tilewise"
    subprocess.run([sys.executable, TESTS.parent / "hub" / "build.py", folder], check=True, capture_output=True)
    return folder


def run(folder, loader):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TESTS.parent / "src")}
    command = [sys.executable, TESTS / "hub_child.py", folder, loader]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_it_loads_without_the_package(folder):
    run(folder, "import")


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="kernels is not installed")
def test_kernels_loads_it(folder):
    run(folder, "kernels")


def test_its_metadata(folder):
    variants = sorted((folder / "build").iterdir())
    assert [x.name for x in variants] == ["torch-cpu", "torch-cuda"]
    for variant in variants:
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["id"].isidentifier()
        digests = {
            path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in variant.rglob("*")
            if path.is_file() and path.suffix != ".json" and "__pycache__" not in path.parts
        }
        assert metadata["digest"]["files"] == digests


def test_its_imports_are_relative_and_of_torch(folder):
    """Or of Python itself, or of triton, which comes with torch."""
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for path in (folder / "build" / "torch-cpu").rglob("*.py"):
        for module in re.findall(
            r"^\s*(?:from|import) ([\w]+)[\w.]*(?: import| as|\s*$)", path.read_text(), re.MULTILINE
        ):
            assert module in allowed, (path.name, module)
