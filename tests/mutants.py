"""The faults of faults.py, planted one at a time: does a test of the short run fail?

    python tests/mutants.py [words]     # all, or those whose file, text or test contains one of the words

Each is planted in a copy of the tree, and the test that should notice is run there. A fault is caught if a test fails
that passes without it; if nothing fails, or nothing can be collected, the tests are weaker than they look.
test_mutants.py holds in every run that the list is true: each text occurs once in its file, and each test exists.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from fault import Fault
from faults import FAULTS

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "docs", "examples", "pyproject.toml")  # two of which the world of processes reads
LONGEST = 600  # seconds; a fault may make a program that never ends


def fails(test: str, fault: Fault | None) -> str:
    """Whether a test fails with a fault, or without one: "yes", "no", or why that is not known."""
    with tempfile.TemporaryDirectory(prefix="tilewise-mutant-") as folder:
        for name in COPIED:
            source, to = ROOT / name, Path(folder, name)
            if source.is_dir():
                shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, to)
        if fault is not None:
            path = Path(folder, "src", fault.file)
            source_text = path.read_text(encoding="utf-8")
            assert source_text.count(fault.text) == 1, f"{fault.file}: {fault.text!r} does not occur once"
            path.write_text(source_text.replace(fault.text, fault.becomes), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{test}"]
        environment = os.environ | {"PYTHONPATH": str(Path(folder, "src"))}
        try:
            done = subprocess.run(command, cwd=folder, env=environment, timeout=LONGEST, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return f"no end in {LONGEST} s"
    # An error in a fixture ends with 1 as well, but then nothing has failed.
    if done.returncode == 1 and re.search(r"\b[1-9]\d* failed\b", done.stdout):
        return "yes"
    return {0: "no"}.get(done.returncode, f"no test ran (status {done.returncode})")


@cache
def passes(test: str) -> bool:
    """Without a fault; each is asked once, or by two threads at a time twice."""
    return fails(test, None) == "no"


def run(fault: Fault) -> tuple[str, float]:
    """What came of it: "caught", or why not; and how many seconds that took."""
    start = time.perf_counter()
    found = fails(fault.test, fault)
    if found == "yes":
        found = "caught" if passes(fault.test) else "fails without it too"
    return "SURVIVED" if found == "no" else found, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant each fault and run the test that should notice.")
    parser.add_argument("words", nargs="*", help="only faults whose file, text or test contains one of these")
    parser.add_argument("-n", type=int, default=1, help="faults at a time")
    arguments = parser.parse_args()
    chosen = [x for x in FAULTS if not arguments.words or any(w in " ".join(x) for w in arguments.words)]
    left = 0
    with ThreadPoolExecutor(arguments.n) as pool:
        for fault, (found, seconds) in zip(chosen, pool.map(run, chosen), strict=True):
            left += found != "caught"
            print(f"{found:10} {seconds:6.1f} s  {fault.file}: {fault.wrong}  [{fault.test}]", flush=True)
    print(f"{len(chosen) - left} of {len(chosen)} caught")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
