"""What tests share: the numbers that they draw, and child processes that interpret or compile Triton's kernels."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import bytecode_written  # noqa: F401  (before torch)
import pytest
from durations import pytest_runtest_logreport, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401  (hooks)
from garbage import collect_seldom

# Child processes import the package of this checkout, installed or not.
SOURCES = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """What is imported and collected stays: the collector of garbage need not look through it again and again, which
    was a quarter of the time of the collection, and 5 to 8 % of the time of small tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        collect_seldom()
        gc.enable()


@pytest.fixture(scope="session")
def set_seed():
    """torch.manual_seed; imported here, since of xdist's processes the one that starts the others runs no test."""
    import torch

    # Short operators in several threads wait for each other more than they work, and pytest-xdist's processes take each
    # other's cores: half of the time of many a file.
    torch.set_num_threads(1)
    # Without a GPU torch.manual_seed keeps, for the time when there is one, the seed and a printed stack for each of
    # its kinds: a millisecond a test, a third of what pytest takes for one.
    return torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def same_numbers_each_time(set_seed):
    """A test that draws without a generator of its own draws the same each time; soak.py is there to draw afresh."""
    set_seed(0)


@pytest.fixture(scope="session")
def interpreter():
    """Calls a function, or what a dotted name stands for there, in a child process where Triton's kernels are Python:
    TRITON_INTERPRET is read when triton is imported, so this process stays as it was."""
    pytest.importorskip("triton")
    import interpreter_child
    from processes import fresh

    with fresh(interpreter_child.start) as pool:
        yield lambda function, *args: pool.submit(interpreter_child.call, function, *args).result()


@pytest.fixture(scope="session")
def compilers(tmp_path_factory):
    """`aot_compilers.Compilers`: compiles for GPUs that are not here."""
    pytest.importorskip("triton")
    from aot_compilers import Compilers

    compilers = Compilers(tmp_path_factory.mktemp("triton-cache"))
    yield compilers
    compilers.close()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A page in a headless browser, see `browser.Browser`."""
    import browser

    if browser.find() is None:
        pytest.skip("no Chromium here: `make test-browser` installs one, or name it in CHROMIUM")
    running = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield running
    running.close()
