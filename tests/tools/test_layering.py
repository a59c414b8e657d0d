"""Which module may import which, and what importing tilewise costs."""

import ast
import inspect
import os
import random
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest
from processes import python
from source_trees import Trees

import tilewise
from tilewise.backends.protocol import Backend, Pass
from tilewise.planner import BACKENDS, TANGENTS, backend_module

PACKAGE = Path(tilewise.__file__).parent
REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Packages from the ground up: a module imports its own package, and packages of lower floors. A module of no listed
# package has the floor of the innermost one that it is in.
FLOORS = [
    {"spec", "quantities", "layouts", "cache"},
    {"backends"},
    {"planner", "backends.launch", "backends.sequences"},
    {"derivatives"},
    {"backends.kernels", "operator"},
    {"backends.reference", "backends.cpu", "backends.triton", "backends.gluon"},
    {"backends.gluon.sm90.common"},
    {"backends.gluon.sm90.forward"},
    {"backends.gluon.sm90.backward"},
    {"backends.gluon.sm90", "bias"},
    {"masks", "merge"},
    {"frontend"},
    {"topk", "varlen"},
    {"distributed", "explanation"},
    {"api", "ops.gemm", "ops.row_softmax", "windows"},
    {"scaled_dot_product", "distributed.triangle", "plans", "nn"},
    {"integrations"},
    {"", "__main__"},
]
FLOOR = {f"tilewise.{name}".rstrip("."): n for n, names in enumerate(FLOORS) for name in names}
# Backends are loaded by their names in the planner; what may import one by itself, but for its own modules.
BACKENDS_OF = {
    "tilewise.backends.reference": set(),
    "tilewise.backends.cpu": set(),
    "tilewise.backends.triton": set(),
    "tilewise.backends.gluon": {"tilewise.ops.gemm"},
}
TRITON = {"tilewise.backends", "tilewise.ops", "tilewise.topk", "tilewise.windows"}


def name_of(path):
    parts = ["tilewise", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = Trees({name_of(path): path for path in SOURCES})


@cache
def imports(tree):
    """Every module that the source names, at its top or inside a function; `from a import b` is a.b if that is one."""
    return list(_imports(tree))


def _imports(tree):
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


def inside(module, package):
    return module == package or module.startswith(package + ".")


@cache
def package_of(module):
    """The innermost listed package that the module is in."""
    return max((package for package in FLOOR if inside(module, package)), key=len)


def test_imports_run_one_way():
    for module in MODULES:
        package = package_of(module)
        for imported in imports(MODULES[module]):
            own = inside(imported, module)  # a package hands on the public names of its modules
            if inside(imported, "tilewise") and package_of(imported) != package and not own:
                assert FLOOR[package_of(imported)] < FLOOR[package], f"{module} imports {imported}"


def loaded_with(module):
    """The modules that importing it imports before its own definitions are there."""
    found = set(imports(ast.Module([x for x in MODULES[module].body if isinstance(x, ast.Import | ast.ImportFrom)])))
    return found & MODULES.keys() - {module}


def test_no_circle_of_imports():
    graph = TopologicalSorter({module: loaded_with(module) for module in MODULES})
    graph.prepare()  # raises with the circle


def test_every_listed_package_exists():
    assert set(FLOOR) <= {*MODULES, "tilewise.ops"}


@pytest.mark.parametrize("backend", BACKENDS_OF)
def test_backends_are_loaded_by_name(backend):
    """And import no other."""
    for name in MODULES:
        if not inside(name, backend) and not any(inside(name, x) for x in BACKENDS_OF[backend]):
            assert not [i for i in imports(MODULES[name]) if inside(i, backend)], name


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_has_what_the_protocol_says(name):
    """With the same parameters: modules are taken for `Backend` without a look."""
    backend = backend_module(name)
    for member in ("declines", "prefers", "tiles"):
        _, *expected = inspect.signature(getattr(Backend, member)).parameters.values()
        found = inspect.signature(getattr(backend, member)).parameters.values()
        assert [(x.name, x.default) for x in found] == [(x.name, x.default) for x in expected], member
    passes = set(get_args(Pass)) if name in TANGENTS.values() else {"forward", "backward"}
    assert set(backend.prepare) == passes


def test_only_its_backend_imports_triton():
    for module in MODULES:
        names = [name for name in imports(MODULES[module]) if inside(name, "triton")]
        own = any(inside(module, x) for x in TRITON) and not inside(module, "tilewise.backends.cpu")
        assert own or not names, module


def test_layouts_import_no_torch():
    found = {x.split(".")[0] for name in MODULES if inside(name, "tilewise.layouts") for x in imports(MODULES[name])}
    assert found.isdisjoint({"torch", "triton", "numpy"})


def test_only_the_runtime_and_autograd_know_torch_autograd():
    """And of these one module alone registers operators."""
    for module in (x for x in MODULES if not inside(x, "tilewise.integrations")):
        tree = MODULES[module]
        dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | set(imports(tree))
        if module != "tilewise.operator.custom_op":
            assert not [name for name in dotted if name.startswith("torch.library")], module
        if module.split(".")[-1] != "autograd" and package_of(module) not in ("tilewise.operator", "tilewise.windows"):
            assert not [name for name in dotted if name.startswith("torch.autograd")], module


def child(code):
    """Run code in a fresh interpreter, without the test run's environment switches; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return python("-c", code, env=environment).stdout.split()


@cache
def children():
    """What each of these prints in a process that has imported torch and nothing of tilewise but its name: forked from
    one, for torch takes a second."""
    codes = {
        "call": """
had = "triton" in sys.modules
q = torch.zeros(1, 1, 2, 8)
tilewise.attention(q, q, q, bias=torch.zeros(2, 2, requires_grad=True)).sum().backward()
print(had == ("triton" in sys.modules) and "transformers" not in sys.modules, torch.cuda.is_initialized())
""",
        "calls": """
had = "torch.distributed.tensor" in sys.modules
x = torch.zeros(1, 1, 2, 8)
tilewise.attention(x, x, x)
tilewise.attention(x.to("meta"), x.to("meta"), x.to("meta"))
print(had, "torch.distributed.tensor" in sys.modules, "torch.utils.flop_counter" in sys.modules)
""",
        "bench": "import tilewise_tools.bench.__main__, tilewise_tools.bench.run; print('typer' in sys.modules)",
        "names": """
import tilewise.integrations
tilewise.attention, tilewise.scaled_dot_product_attention
print("transformers" in sys.modules)
""",
        "dir": "import tilewise.api, tilewise.varlen; print(*dir(tilewise))",
        "all": all_modules(),
        **{name: f"print(tilewise.{name}.__name__)" for name in PACKAGES},
    }
    found = child(f"""
import os, sys, torch, tilewise
for name, code in {codes}.items():
    print("-", name, flush=True)
    if not os.fork():
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, name
""")
    parts = " ".join(found).split("- ")[1:]
    return {name: words for name, *words in map(str.split, parts)}


def test_importing_tilewise_touches_nothing_heavy():
    before, names = child("""
import sys, tilewise
print(*[m for m in ("torch", "triton", "transformers", "numpy") if m in sys.modules], "-", sep="")
assert set(tilewise.__all__) <= set(dir(tilewise))
print(",".join(sorted(tilewise.__all__)))
""")
    assert before == "-"
    assert names == ",".join(sorted(tilewise.__all__))


def test_a_call_on_the_cpu_touches_neither_cuda_nor_triton():
    assert children()["call"] == ["True", "False"]


def test_a_call_without_dtensors_does_not_import_them():
    assert children()["calls"] == ["False"] * 3


def test_importing_tilewise_does_not_import_transformers():
    assert children()["names"] == ["False"]


def test_the_run_of_a_bench_needs_no_typer():
    assert children()["bench"] == ["False"]


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


PACKAGES = ("bias", "distributed", "integrations", "layouts", "nn")


def test_dir_has_public_names_alone():
    assert (
        child("import tilewise; print(*dir(tilewise))") == children()["dir"] == sorted([*tilewise.__all__, *PACKAGES])
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_are_resolved(name):
    """Each where no other has been."""
    assert children()[name] == [f"tilewise.{name}"]


def all_modules():
    """Python sets an imported module as an attribute of its package: all are imported first, in a random order."""
    names = [x for x in MODULES if x != "tilewise.__main__" and not inside(x, "tilewise.integrations.transformers")]
    random.shuffle(names)
    assert {x.rpartition(".")[2] for x in names if x.count(".") == 1}.isdisjoint(tilewise.__all__)
    return f"""
import importlib
print({names}, file=sys.stderr)
for name in {names}:
    importlib.import_module(name)
q, x, ends = torch.zeros(1, 1, 2, 8), torch.zeros(2, 1, 8), torch.tensor([0, 2], dtype=torch.int32)
o, lse = tilewise.attention(q, q, q, return_lse=True)
calls = dict(
    attention=(q, q, q), scaled_dot_product_attention=(q, q, q), explain=(q, q, q), plan=(q, q, q),
    matmul=(q, q.mT), softmax=(q,),
    varlen_attention=(x, x, x, ends, ends, 2, 2), explain_varlen=(x, x, x, ends, ends, 2, 2),
    varlen_attn=(x, x, x, ends, ends, 2, 2), merge_attention=([o, o], [lse, lse]), dynamic_mask=(q[..., :2],),
    cache_info=(), clear_caches=(), tree_positions=([2],), sdpa=(), AuxRequest=(), AuxOutput=(),
)
assert set(calls) | {{"TileMask"}} == set(tilewise.__all__)
for name, given in calls.items():
    getattr(tilewise, name)(*given, **dict(keep=1) if name == "dynamic_mask" else dict())
print(type(tilewise.TileMask).__name__)
"""


def test_no_module_hides_a_public_name():
    assert children()["all"] == ["type"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'tilewise' has no attribute 'atention'$"):
        tilewise.atention  # noqa: B018


def test_names_that_gluon_has_dropped_stand_in_one_place():
    """Triton 3.9 lacks them, and CI compiles by older ones: a kernel that has one fails on a plain install alone."""
    dropped = re.compile(r"\._reinterpret\(|\basync_copy_(?:global_to_shared|shared_to_global)\b|\bthread_barrier\b")
    found = [path.name for path in Path(tilewise.__file__).parent.rglob("*.py") if dropped.search(path.read_text())]
    assert found == ["compat.py"]
