"""The shape of the house: which module may import which, what importing tilewise costs, how long a module may be."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import tilewise
from tilewise.backends.protocol import Backend, Pass
from tilewise.plan import BACKENDS, backend_module

PACKAGE = Path(tilewise.__file__).parent
REPOSITORY = Path(__file__).parents[1]
SOURCES = sorted(PACKAGE.rglob("*.py"))

# What each room may import of tilewise; a room's own modules are always allowed. A room that is not listed (the
# doors: sdpa, integrations, cli, demo, ...) may import anything below, and no listed room may import it.
PROTOCOL = {"tilewise.backends", "tilewise.backends.protocol"}
BACKEND = {*PROTOCOL, "tilewise.memory", "tilewise.problem", "tilewise.score", "tilewise.quantities"}
READING = {"tilewise.autocast", "tilewise.keywords", "tilewise.tensors"}  # what the doors read arguments with
# What backends and operators import, and is none itself.
SHARED = {
    f"tilewise.backends.{name}"
    for name in (
        "dropout",
        "kept_keys",
        "kept_lists",
        "kernel_arguments",
        "launcher",
        "low_bits",
        "products",
        "score",
        "sequences",
        "short_launch",
        "sinks",
        "tile_mask",
        "vectors",
    )
}
TRITON_BACKEND = {*SHARED, *BACKEND}
ROOMS = {
    "tilewise.autocast": set(),
    "tilewise.keywords": set(),
    "tilewise.memory": set(),
    "tilewise.tensors": set(),
    "tilewise.score": set(),
    "tilewise.layouts": set(),
    "tilewise.quantities": set(),
    "tilewise.dynamic_mask": {
        "tilewise.backends",
        "tilewise.backends.kept_keys",
        "tilewise.ops.runtime",
        "tilewise.score",
        "tilewise.tensors",
        "tilewise.tile_mask",
    },
    "tilewise.tile_mask": {
        "tilewise.backends",
        "tilewise.backends.kept_keys",
        "tilewise.ops.runtime",
        "tilewise.score",
        "tilewise.tensors",
    },
    "tilewise.problem": {"tilewise.memory", "tilewise.score"},
    "tilewise.bias": {
        "tilewise.backends",
        "tilewise.backends.vectors",
        "tilewise.ops.runtime",
        "tilewise.problem",
        "tilewise.score",
        "tilewise.tensors",
    },
    "tilewise.backends": {"tilewise.backends.protocol", "tilewise.problem", "tilewise.score"},
    "tilewise.backends.protocol": {"tilewise.problem", "tilewise.score"},
    "tilewise.backends.oracle": {"tilewise.backends.sequences", *BACKEND},
    "tilewise.backends.cpu": {"tilewise.backends.sequences", *BACKEND},
    "tilewise.backends.dropout": set(),
    "tilewise.backends.kept_keys": {"tilewise.backends", "tilewise.backends.launcher", "tilewise.score"},
    "tilewise.backends.kept_lists": {"tilewise.backends.tile_mask", "tilewise.problem", "tilewise.score"},
    "tilewise.backends.kernel_arguments": set(),
    "tilewise.backends.launcher": {"tilewise.backends.kernel_arguments", "tilewise.backends.short_launch"},
    "tilewise.backends.low_bits": {"tilewise.score"},
    "tilewise.backends.products": set(),
    "tilewise.backends.score": {"tilewise.score"},
    "tilewise.backends.sequences": BACKEND,
    "tilewise.backends.short_launch": {"tilewise.backends.kernel_arguments"},
    "tilewise.backends.sinks": {"tilewise.backends.launcher"},
    "tilewise.backends.tile_mask": {"tilewise.backends.launcher", "tilewise.problem", "tilewise.score"},
    "tilewise.backends.vectors": {"tilewise.backends", "tilewise.backends.launcher"},
    "tilewise.backends.gluon": TRITON_BACKEND,  # what Gluon kernels of any architecture share
    "tilewise.backends.gluon.sm90": {"tilewise.backends.gluon", *TRITON_BACKEND},
    "tilewise.backends.triton": TRITON_BACKEND,
    "tilewise.merge": {"tilewise.problem", "tilewise.tensors"},
    "tilewise.plan": {"tilewise.backends.protocol", "tilewise.problem"},
    "tilewise.ops": set(),
    "tilewise.ops.runtime": {"tilewise.score", "tilewise.tensors"},  # PyTorch alone is needed for what it asks
    "tilewise.ops.matmul": {
        "tilewise.ops.runtime",
        "tilewise.backends",
        "tilewise.backends.gluon",
        "tilewise.backends.gluon.sm90",
        "tilewise.memory",
        "tilewise.quantities",
        "tilewise.tensors",
        *SHARED,
    },
    "tilewise.ops.softmax": {"tilewise.ops.runtime", "tilewise.quantities", "tilewise.tensors"},
    "tilewise.ops.windows": {"tilewise.ops.runtime", "tilewise.backends", *SHARED},
    "tilewise.structure": BACKEND,
    "tilewise.dispatch": {"tilewise.ops.runtime", "tilewise.plan", "tilewise.structure", *BACKEND},
    "tilewise.autograd": {"tilewise.dispatch", "tilewise.ops.runtime", "tilewise.backends", "tilewise.score"},
    "tilewise.call": {
        "tilewise.bias",
        "tilewise.autograd",
        "tilewise.dispatch",
        "tilewise.ops.runtime",
        "tilewise.plan",
        "tilewise.structure",
        "tilewise.tile_mask",
        *READING,
        *BACKEND,
    },
    "tilewise.varlen": {
        "tilewise.autograd",
        "tilewise.backends",
        "tilewise.bias",
        "tilewise.call",
        "tilewise.plan",
        "tilewise.problem",
        "tilewise.score",
        "tilewise.tile_mask",
        *READING,
    },
    "tilewise.leading": {
        "tilewise.backends",
        "tilewise.bias",
        "tilewise.call",
        "tilewise.problem",
        "tilewise.tensors",
        "tilewise.tile_mask",
    },
    "tilewise.gather": {
        "tilewise.autograd",
        "tilewise.backends",
        "tilewise.backends.kept_keys",
        "tilewise.call",
        "tilewise.ops.runtime",
        "tilewise.problem",
        "tilewise.score",
        "tilewise.tensors",
        "tilewise.tile_mask",
    },
    "tilewise.jagged": {"tilewise.problem", "tilewise.score", "tilewise.tensors", "tilewise.varlen"},
    "tilewise.distributed": {  # above call, beside api
        "tilewise.autograd",
        "tilewise.bias",
        "tilewise.call",
        "tilewise.dispatch",
        "tilewise.distributed.triangle",
        "tilewise.merge",
        "tilewise.ops.runtime",
        "tilewise.plan",
        "tilewise.tile_mask",
        "tilewise.varlen",
        *READING,
        *BACKEND,
    },
    "tilewise.distributed.triangle": {"tilewise.api", "tilewise.distributed", "tilewise.problem", *READING},
    "tilewise.api": {
        "tilewise.distributed",  # of DTensors whose sequence is split; imported for these alone
        "tilewise.autograd",
        "tilewise.backends",
        "tilewise.call",
        "tilewise.gather",
        "tilewise.jagged",
        "tilewise.leading",
        "tilewise.ops.runtime",
        "tilewise.problem",
        "tilewise.tile_mask",
        *READING,
    },
}
TRITON_ROOMS = {
    *SHARED,
    "tilewise.backends.gluon",
    "tilewise.backends.triton",
    "tilewise.ops.matmul",
    "tilewise.ops.softmax",
    "tilewise.ops.windows",
}


def name_of(path):
    parts = ["tilewise", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def imports(tree):
    """Every module that the source names, at its top or inside a function; `from a import b` is a.b if that is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if node.module == "tilewise":  # a public name: its home is what is imported
                    inner = tilewise._HOMES.get(alias.name, inner)
                yield inner if inner in MODULES else node.module if node.module != "tilewise" else inner


def inside(module, room):
    return module == room or module.startswith(room + ".")


def room_of(module):
    """The innermost listed room that the module is in, or None."""
    rooms = [room for room in ROOMS if inside(module, room)]
    return max(rooms, key=len, default=None)


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) is not None])
def test_arrows_run_one_way(module):
    room = room_of(module)
    for imported in imports(MODULES[module]):
        if inside(imported, "tilewise") and room_of(imported) != room:
            assert room_of(imported) in ROOMS[room], f"{module} imports {imported}"


def test_every_backend_has_a_room():
    """And imports no other; that kernels in Gluon have one room in common is no backend's own."""
    rooms = {room_of(name) for name in MODULES if name.startswith("tilewise.backends.")}
    assert rooms == {room for room in ROOMS if room.startswith("tilewise.backends.")}
    backends = {backend_module(name).__name__ for name in BACKENDS}
    assert backends == rooms - SHARED - {"tilewise.backends.gluon", "tilewise.backends.protocol"}
    for backend in backends:
        for name in MODULES:
            if inside(name, backend):
                found = [i for i in imports(MODULES[name]) if room_of(i) in backends - {backend}]
                assert not found, f"{name} imports {found}"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_has_what_the_protocol_says(name):
    """With the same parameters: modules are taken for `Backend` without a look."""
    backend = backend_module(name)
    for member in ("declines", "prefers", "tiles"):
        _, *expected = inspect.signature(getattr(Backend, member)).parameters.values()
        found = inspect.signature(getattr(backend, member)).parameters.values()
        assert [(x.name, x.default) for x in found] == [(x.name, x.default) for x in expected], member
    assert set(backend.prepare) == set(get_args(Pass))


@pytest.mark.parametrize("module", MODULES)
def test_only_its_backend_imports_triton(module):
    names = [name for name in imports(MODULES[module]) if inside(name, "triton")]
    assert not names or any(inside(module, room) for room in TRITON_ROOMS)


@pytest.mark.parametrize("module", [name for name in MODULES if inside(name, "tilewise.layouts")])
def test_layouts_import_no_torch(module):
    assert not [name for name in imports(MODULES[module]) if name.split(".")[0] in ("torch", "triton", "numpy")]


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) is not None])
def test_only_the_runtime_and_autograd_know_torch_autograd(module):
    """And of these one module alone registers operators."""
    tree = MODULES[module]
    dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | set(imports(tree))
    if module != "tilewise.ops.runtime.operator":
        assert not [name for name in dotted if name.startswith("torch.library")]
    if module.split(".")[-1] != "autograd" and room_of(module) != "tilewise.ops.runtime":
        assert not [name for name in dotted if name.startswith("torch.autograd")]


@pytest.mark.parametrize(
    "path", [*SOURCES, *(REPOSITORY / "tests").rglob("*.py")], ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_no_module_over_600_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600


@pytest.mark.parametrize("module", MODULES)
def test_no_function_with_twenty_parameters(module):
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            assert count < 20, f"{module}.{node.name} has {count} parameters"


def child(code):
    """Run code in a fresh interpreter, without the test run's environment switches; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_tilewise_touches_neither_cuda_nor_triton():
    """Nor torch, transformers or anything else heavy; a call on the CPU does not import triton either."""
    loaded = "[m for m in ('torch', 'triton', 'transformers', 'numpy') if m in sys.modules]"
    before, names, after_call, cuda = child(f"""
import sys, tilewise
print(*{loaded}, "-", sep="")
assert set(tilewise.__all__) <= set(dir(tilewise))
print(",".join(sorted(tilewise.__all__)))
import torch
had = "triton" in sys.modules
q = torch.zeros(1, 1, 2, 8)
tilewise.attention(q, q, q, bias=torch.zeros(2, 2, requires_grad=True)).sum().backward()
print(had == ("triton" in sys.modules) and "transformers" not in sys.modules)
print(torch.cuda.is_initialized())
""")
    assert before == "-"
    assert names == ",".join(sorted(tilewise.__all__))
    assert after_call == "True"
    assert cuda == "False"


@pytest.mark.parametrize("name", tilewise.__all__)
def test_public_names_are_resolved(name):
    value = getattr(tilewise, name)
    assert value.__module__ == tilewise._HOMES[name]
    assert value.__doc__


def test_the_library_imports_no_tools():
    """The command line alone starts them: `tilewise.__main__`, inside its function."""
    found = {name for name in MODULES for i in imports(MODULES[name]) if i.split(".")[0] == "tilewise_tools"}
    assert found == {"tilewise.__main__"}
    top = [x for x in MODULES["tilewise.__main__"].body if isinstance(x, ast.Import | ast.ImportFrom)]
    assert "tilewise_tools" not in " ".join(map(ast.unparse, top))


def test_dir_has_public_names_alone():
    names = sorted([*tilewise.__all__, "bias", "distributed", "integrations", "layouts"])
    for code in ("pass", "import tilewise.api, tilewise.varlen"):
        assert child(f"import tilewise; {code}; print(*dir(tilewise))") == names


@pytest.mark.parametrize("name", ["bias", "distributed", "integrations", "layouts"])
def test_packages_are_resolved(name):
    assert child(f"import tilewise; print(tilewise.{name}.__name__)") == [f"tilewise.{name}"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'tilewise' has no attribute 'atention'$"):
        tilewise.atention  # noqa: B018


def test_names_that_gluon_has_dropped_stand_in_one_place():
    """Triton 3.9 lacks them, and CI compiles by older ones: a kernel that has one fails on a plain install alone."""
    dropped = re.compile(r"\._reinterpret\(|\basync_copy_(?:global_to_shared|shared_to_global)\b|\bthread_barrier\b")
    found = [path.name for path in Path(tilewise.__file__).parent.rglob("*.py") if dropped.search(path.read_text())]
    assert found == ["compat.py"]
