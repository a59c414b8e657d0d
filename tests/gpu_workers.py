"""tests/gpu in many processes over all GPUs, in as many runs as it takes.

    python tests/gpu_workers.py                      # what has not passed yet, by build/gpu_outcomes
    python tests/gpu_workers.py --seconds 580        # as much of it as fits
    python tests/gpu_workers.py --fresh -- -k varlen # from the start; pytest's arguments behind --

Compiling is nearly all of the time: one process takes hours, 34 on 32 cores 10 minutes. Tests of several GPUs start
processes of their own, which wait for each other: they run last, beside nothing else. What has failed because so many
processes had no memory left passes in a second run, with few --processes.

Of pytest this is a plugin, too: it gives each worker a GPU and writes down what came out.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TOGETHER = ("test_distributed.py", "test_mesh.py")  # of several GPUs; at once, as they mostly compile
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
GPUS, OUTCOMES, BEFORE = "TILEWISE_TEST_GPUS", "TILEWISE_TEST_OUTCOMES", "TILEWISE_TEST_BEFORE"
LOST = ("CUDA error", "illegal memory access", "misaligned address")  # after which a process can launch nothing more

if WORKER and int(os.environ.get(GPUS, "0")):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(WORKER.removeprefix("gw")) % int(os.environ[GPUS]))


def outcomes(file: str) -> list[str]:
    path = Path(file)
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def passed(lines: Sequence[str]) -> set[str]:
    """The tests that have passed or were skipped, of lines "outcome, when, seconds, name"."""
    split = [line.split(" ", 3) for line in lines]
    return {name for outcome, _, _, name in split if outcome in ("passed", "skipped")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what had passed before this run; the rest in an order that mixes files, alike in all workers."""
    done = passed(outcomes(os.environ[OUTCOMES])[: int(os.environ[BEFORE])])
    items[:] = [item for item in items if item.nodeid not in done]
    random.Random(0).shuffle(items)


_lost = False


def pytest_runtest_makereport(call: pytest.CallInfo) -> None:
    global _lost
    _lost = _lost or (bool(WORKER) and call.excinfo is not None and any(x in str(call.excinfo.value) for x in LOST))


def pytest_runtest_protocol() -> None:
    """xdist starts another worker, and charges this test with it: the next run has it again."""
    if _lost:
        os._exit(3)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not WORKER and (report.when == "call" or report.outcome != "passed"):
        with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
            file.write(f"{report.outcome} {report.when} {report.duration:.2f} {report.nodeid}\n")


def run(seconds: float, arguments: Sequence[str], more: dict[str, str]) -> int:
    """pytest's status, 0 where nothing was left to run; 124 if the time was up: it is told to stop, and says what it
    has found."""
    # Children of tests import tilewise, too, which need not be installed.
    before = [str(Path(__file__).parent), str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    known = str(len(outcomes(more[OUTCOMES])))
    environment = {**os.environ, **more, BEFORE: known, "PYTHONPATH": os.pathsep.join(before)}
    environment.pop("PYTEST_XDIST_WORKER", None)  # of a run that has started this one
    command = [sys.executable, "-m", "pytest", "-p", "gpu_workers", "--dist", "worksteal", "-q", *arguments]
    # A script's background job ignores SIGINT, and so would this one.
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    )
    try:
        status = process.wait(max(seconds, 1.0))
        return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return 124


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which what is left waits for a run")
    parser.add_argument(
        "--processes", type=int, help="default: two more than cores, if each has 4 GiB of a GPU's memory"
    )
    parser.add_argument("--outcomes", type=Path, default=REPOSITORY / "build" / "gpu_outcomes", help="of all runs")
    parser.add_argument("--fresh", action="store_true", help="forget the runs before")
    parser.add_argument("arguments", nargs="*", help="of pytest")
    options = parser.parse_args()
    end, count = time.monotonic() + options.seconds, torch.cuda.device_count()
    if not count:
        parser.error("PyTorch finds no CUDA device here")
    options.outcomes.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        options.outcomes.unlink(missing_ok=True)
    room = sum(torch.cuda.get_device_properties(n).total_memory for n in range(count)) >> 32
    processes = options.processes or max(1, min((os.cpu_count() or 1) + 2, room))
    # Line tables are three quarters of what Triton keeps.
    kept = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_STORE_BINARY_ONLY": "1", OUTCOMES: str(options.outcomes.resolve())}
    folder = Path("tests") / "gpu"
    apart = [f"--ignore={folder / name}" for name in TOGETHER]
    status = run(
        options.seconds, [f"-n{processes}", *apart, str(folder), *options.arguments], {**kept, GPUS: str(count)}
    )
    if count > 1 and status != 124:
        together = [str(folder / name) for name in TOGETHER]
        status = max(status, run(end - time.monotonic(), ["-n12", *together, *options.arguments], kept))
    lines = outcomes(str(options.outcomes))
    done = passed(lines)
    failed = {line.split(" ", 3)[3] for line in lines} - done
    print(f"{len(done)} passed or skipped in all runs, {len(failed)} failed: {', '.join(sorted(failed)) or 'none'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
