"""Worker threads that compute parts of a call concurrently.

PyTorch divides each operator among its threads and waits for the last one, hundreds of times per call; each wait takes
milliseconds if another process uses one of the cores. So a call is divided only once: a worker computes complete tiles,
and its operators, which release the GIL, use no other thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Queue = SimpleQueue[tuple[Future, Callable[[], Any]]]

MOST = 16  # workers at most: more would wait for the GIL, so their operators use more threads instead

_queues: dict[int, Queue] = {}  # of the workers, by PyTorch's number of threads
_lock = threading.Lock()


def count() -> int:
    """Return how many parts run concurrently: PyTorch's threads in this thread, at most `MOST`."""
    return min(torch.get_num_threads(), MOST) if _each_thread_has_its_number() else 1


def threads_each() -> int:
    """Return how many threads the operators of a part use."""
    return torch.get_num_threads() // count()


def run(parts: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of ``parts`` in order; raise the first exception when all have ended.

    One part alone runs in the calling thread. A part must not call this function.
    """
    if count() == 1 or len(parts) < 2:
        return [part() for part in parts]
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def in_mode(part: Callable[[], T]) -> T:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):  # each thread has its own
            return part()

    queue = _queue(torch.get_num_threads())
    futures: list[Future[T]] = [Future() for _ in parts]
    for future, part in zip(futures, parts, strict=True):
        queue.put((future, partial(in_mode, part)))
    try:
        wait(futures)
    finally:  # if interrupted, start no other part
        for future in futures:
            future.cancel()
    return [future.result() for future in futures]


@cache
def _each_thread_has_its_number() -> bool:
    """True if `torch.set_num_threads` affects the calling thread only, as with OpenMP."""
    return "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


def _queue(threads: int) -> Queue:
    """Return the queue of the workers for ``threads`` PyTorch threads; workers are never stopped."""
    with _lock:
        if threads not in _queues:
            queue: Queue = SimpleQueue()
            for _ in range(count()):
                started: Future[None] = Future()
                threading.Thread(target=_work, args=(queue, threads_each(), started), daemon=True).start()
                started.result()
            _queues[threads] = queue
        return _queues[threads]


def _work(queue: Queue, threads: int, started: Future[None]) -> None:
    """Compute parts from the queue, with ``threads`` threads for the operators."""
    _answer(started, partial(_use, threads))
    while True:
        future, part = queue.get()
        if future.set_running_or_notify_cancel():
            _answer(future, part)
        del future, part  # hold no tensor of a call while waiting


def _answer(future: Future[T], part: Callable[[], T]) -> None:
    try:
        future.set_result(part())
    except BaseException as error:  # noqa: BLE001  (raised again by future.result())
        future.set_exception(error)


def _use(threads: int) -> None:
    """Set the number of threads for operators of this new thread.

    `torch.set_num_threads` also sets the initial number of later threads, which a short-lived thread restores.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    thread = threading.Thread(target=torch.set_num_threads, args=(usual,))
    thread.start()
    thread.join()


def _forget() -> None:
    """Drop the workers in a forked process, where their threads do not exist."""
    global _lock
    _lock = threading.Lock()
    _queues.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
