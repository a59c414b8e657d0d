"""The documents name code that exists, and their formulas render."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import tilewise

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "tilewise"
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
TEXTS = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
MATHS = (REPOSITORY / "docs" / "maths.md").read_text(encoding="utf-8")
LAYOUTS = (REPOSITORY / "docs" / "layouts.md").read_text(encoding="utf-8")
ROOMS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
NAME = re.compile(r"`(\w+(?:\.\w+)+)`")


def names(text):
    """`spec.tiles.key_tiles` and the like: dotted, in backticks, beginning with a module of the package."""
    return [name for name in NAME.findall(text) if name.split(".")[0] in ROOMS]


def defined(body):
    """What a module or class defines: functions, classes, and names that are assigned."""
    found = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {n.id: node for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def exists(name):
    """Whether the package has it: a module, or something defined in one. Read, not imported: kernels need no GPU."""
    parts = name.split(".")
    at = PACKAGE
    while parts and (at / parts[0]).is_dir():
        at /= parts.pop(0)
    if parts and (at / parts[0]).with_suffix(".py").is_file():
        source = (at / parts.pop(0)).with_suffix(".py")
    else:
        source = at / "__init__.py"
    body = ast.parse(source.read_text(encoding="utf-8")).body
    for part in parts:
        node = defined(body).get(part)
        if node is None:
            return False
        body = getattr(node, "body", [])
    return True


def each_document(function):
    return pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))(function)


def test_names_are_looked_up():
    assert exists("spec.tiles.key_tiles")
    assert exists("backends.reference")
    assert exists("backends.triton.declines")
    assert exists("spec.problem.Problem.flops")
    assert exists("backends.protocol.Inputs.q")
    assert not exists("spec.tiles.tiles_of_keys")
    assert not exists("spec.problem.Problem.flop")
    assert not exists("backends.metal.forward")


@pytest.mark.parametrize("name", sorted(set(names(MATHS + LAYOUTS))))
def test_documents_name_what_exists(name):
    assert exists(name)


@pytest.mark.parametrize("section", re.split(r"^## ", MATHS, flags=re.MULTILINE)[2:-1], ids=lambda s: s.split("\n")[0])
def test_every_section_with_a_formula_names_its_functions(section):
    """All but the symbols, which come first, and the sources, which come last."""
    assert "```math" in section
    assert names(section)


@each_document
def test_formulas_render(path):
    """GitHub takes a backslash before punctuation from inline maths, and `$` must come in pairs on a line."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", TEXTS[path], flags=re.DOTALL)
    for line in text.splitlines():
        assert line.count("$") % 2 == 0, line
        for formula in re.findall(r"\$([^$]*)\$", line):
            assert formula == formula.strip(), line
            assert not re.search(r"\\[^A-Za-z]", formula), line
            assert formula.count("{") == formula.count("}"), line


def headings(text):
    """What a link can name after `#`."""
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in lines}


def links(path):
    """(file, heading) of each link of a document; the file as a path, the heading "" where there is none."""
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[path]):
        file, _, heading = link.partition("#")
        yield (path.parent / file).resolve() if file else path, heading


@each_document
def test_code_is_as_wide_as_the_site_shows(path):
    """88 columns, in fences and in indented blocks after an empty line; README is read elsewhere, too."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", TEXTS[path], re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fences if language != "math"]
    blocks += [re.sub(r"^ {4}", "", x, flags=re.M) for x in re.findall(r"\n\n((?: {4}.*\n)+)", TEXTS[path])]
    limit = 120 if path.name == "README.md" and path.parent == REPOSITORY else 88
    assert [line for block in blocks for line in block.splitlines() if len(line) > limit] == []


@each_document
def test_links_resolve(path):
    """Those to files of the repository, and to headings of its documents."""
    for file, heading in links(path):
        assert file.exists(), file
        assert not heading or heading in headings(TEXTS[file]), (file.name, heading)


@each_document
def test_files_that_are_named_exist(path):
    """``a/b.py`` and the like in backticks, from the repository or the package; a JSON also by its name alone."""
    roots = (REPOSITORY, PACKAGE, PACKAGE / "backends", REPOSITORY / "benchmarks" / "results")
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|json|txt)|\w+\.json)`", TEXTS[path]):
        assert any((root / name).is_file() for root in roots) or "NAME" in name, name


def test_a_users_page_is_short_and_what_is_measured_is_named():
    """One page for a user; results of one run for each question, few pictures, none that no document shows."""
    results, images = REPOSITORY / "benchmarks" / "results", REPOSITORY / "docs" / "images"
    assert len(TEXTS[REPOSITORY / "docs" / "performance.md"].splitlines()) <= 150
    kept = {path.name for path in results.iterdir()}
    named = set(re.findall(r"\b(?:h[12]00|cpu|versions)\w*\.json\b", "\n".join(TEXTS.values())))
    assert named == kept
    assert len(kept) <= 14
    pictures = set(images.iterdir())
    assert len([path for path in pictures if path.suffix == ".png"]) <= 8
    assert pictures <= {file for path in DOCUMENTS for file, _ in links(path)}


RECIPES = (
    "docs/faq.md", "docs/flash-attn.md", "docs/position-biases.md", "docs/packed-batches.md", "docs/recipes.md",
    "docs/sparse-masks.md", "docs/structure-models.md", "docs/switching.md",
)  # fmt: skip
PAGES = ("README.md", "docs/features.md", "docs/index.md", "docs/layouts.md", *RECIPES)
# Other tests run these: test_attention_from_parts.py, distributed_child.py on two processes, and test_tutorial.py.
ELSEWHERE = ("docs/attention-from-parts.md", "docs/distributed.md", "docs/tutorial.md")


def test_every_page_with_code_is_run():
    found = {str(path.relative_to(REPOSITORY)) for path, text in TEXTS.items() if "```python" in text}
    assert found == {*PAGES, *ELSEWHERE}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own, at the first jvp
@pytest.mark.parametrize("name", PAGES)
def test_examples_run(name, capsys):
    """Those in Python, which need no download; each by itself, but those of a page of recipes one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / name).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    before: dict = {}
    for block in blocks:
        exec(compile(block, name, "exec"), before if name in RECIPES else {})
    if name == "README.md":
        promised = re.findall(r"# (torch\.Size.*)$", blocks[0], re.MULTILINE)
        assert promised == capsys.readouterr().out.splitlines()[:1]


def test_absorbed_attention_is_latent_attention():
    """The recipe's output and gradients are those of keys and values of each head."""
    text = TEXTS[REPOSITORY / "docs" / "recipes.md"]
    names = {"torch": torch, "tilewise": tilewise, "B": 2, "H": 3, "N": 20}
    torch.manual_seed(0)
    exec(re.search(r"^## DeepSeek.*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)[1], names)
    leaves = [names[name] for name in ("q_nope", "q_rope", "cache", "w_k", "w_v")]
    q_nope, q_rope, cache, w_k, w_v = exact = [x.detach().double().requires_grad_() for x in leaves]
    c, rope = cache.split([512, 64], -1)
    q, k = torch.cat([q_nope, q_rope], -1), torch.cat([c @ w_k.mT, rope.expand(-1, 3, -1, -1)], -1)
    scores = (q @ k.mT / 192**0.5).masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
    o = scores.softmax(-1) @ (c @ w_v.mT)
    o.square().sum().backward()
    for x, expected in (
        (names["o"].detach(), o.detach()),
        *((x.grad, y.grad) for x, y in zip(leaves, exact, strict=True)),
    ):
        error = (x - expected).abs().max() / expected.abs().max()
        assert error < 1e-5


API = re.findall(r"^::: ([\w.]+)$", "\n".join(text for path, text in TEXTS.items() if path.parent.name == "api"), re.M)


def test_every_public_name_has_its_place_in_the_api():
    names = [f"tilewise.{name}" for name in tilewise.__all__]
    names += [
        f"{room.__name__}.{name}"
        for room in (tilewise.bias, tilewise.distributed, tilewise.nn)
        for name in room.__all__
    ]
    for path in (PACKAGE / "integrations").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.stem in ("evoformer", "flash_attn", "flex", "transformers"):
            found = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
            names += [f"tilewise.integrations.{path.stem}.{name}" for name in found if not name.startswith("_")]
    assert sorted(API) == sorted(names)


def documented(name):
    """What a name of the API stands for: itself, and the public functions of a class."""
    module, _, last = name.rpartition(".")
    if module == "tilewise.integrations.transformers":
        pytest.importorskip("transformers")
    x = getattr(importlib.import_module(module), last)
    if not inspect.isclass(x):
        return [x]
    own = (f for key, f in inspect.getmembers(x, callable) if key[0] != "_")
    return [x, *(f for f in own if not (getattr(f, "__module__", None) or "").startswith("torch"))]


@pytest.mark.parametrize("name", API)
def test_docstrings_name_parameters_that_exist(name):
    """An entry of "Args" may name several, and then begins ``q, k, v:``; that it has a colon, the site checks."""
    for x in documented(name):
        section = re.search(r"^Args:\n((?: .*\n|\n)*)", inspect.getdoc(x) or "", re.MULTILINE)
        entries = re.findall(r"^    (\S[^:]*):", section[1], re.MULTILINE) if section else []
        words = [word.strip(" *") for entry in entries for word in entry.split(",")]
        assert set(words) <= set(inspect.signature(x).parameters), words


@pytest.mark.parametrize("name", [name for name in tilewise.__all__ if inspect.isfunction(getattr(tilewise, name))])
def test_examples_of_docstrings_run(name):
    function = getattr(tilewise, name)
    names = {"torch": torch, "tilewise": tilewise}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(function), names, name, None, None)
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0


def test_the_reading_list_is_short():
    """The table of docs/architecture.md: eleven files, 6,000 lines at most."""
    text = TEXTS[REPOSITORY / "docs" / "architecture.md"]
    files = re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE)
    assert len(files) == 11
    assert sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files) <= 6000


def test_code_beside_a_formula_is_the_code():
    """The cells of code in the tables "side by side with the code"."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.glob("ops/*/**/*.py"))
    cells = re.findall(r"^\| \$.*\$.* \| `(.*)` \|$", MATHS, re.MULTILINE)
    assert len(cells) == 10
    assert [cell for cell in cells if cell not in source] == []
