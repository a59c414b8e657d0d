"""The versions of torch and Triton that are promised: everything that names them names the same ones."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


def minor_versions(name: str) -> list[str]:
    """What `make test-versions` tests, as minor versions."""
    (versions,) = re.findall(rf"^{name} := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [version.rpartition(".")[0] for version in versions.split()]


def test_versions_agree():
    torches, tritons = minor_versions("TORCHES"), minor_versions("TRITONS")
    promise = f"torch {torches[0]} to {torches[-1]} and Triton {tritons[0]} to {tritons[-1]}"
    assert promise in (ROOT / "README.md").read_text()
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [re.split("[>;]=?", line)[1] for line in needed] == [torches[0], tritons[0]]
    minors = [int(version.partition(".")[2]) for version in tritons]
    assert minors == list(range(minors[0], minors[-1] + 1))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_assembler_of_kernels_in_gluon(monkeypatch):
    """On Triton 3.9 they alone are compiled by ptxas 12.9, for the time of a compilation, unless someone has chosen."""
    from triton import knobs

    from tilewise.backends.gluon.sm90.forward import kernel as hopper
    from tilewise.backends.launch import launcher
    from tilewise.backends.triton import forward as portable

    def path(kernel):
        with launcher.assembler(kernel):
            return Path(knobs.nvidia.ptxas_blackwell.path).name

    monkeypatch.setattr(launcher, "VERSION", (3, 9))
    target = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=90)))
    monkeypatch.setattr(launcher, "driver", target)
    assert path(hopper.forward_kernel) == "ptxas"
    assert path(portable.forward_kernel) == "ptxas-blackwell"
    assert launcher.Launch(hopper.forward_kernel, 1, (), ()).options["ptx_version"] == 88
    assert "ptx_version" not in launcher.Launch(portable.forward_kernel, 1, (), ()).options
    assert Path(knobs.nvidia.ptxas_blackwell.path).name == "ptxas-blackwell"
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", knobs.nvidia.ptxas_blackwell.path)
    assert path(hopper.forward_kernel) == "ptxas-blackwell"
