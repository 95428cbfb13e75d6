"""Work in threads that end with the program: Ctrl-C does not wait for what they wait for."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def results_of(work: Callable[[ItemT], ResultT], items: Sequence[ItemT], at_once: int) -> Iterator[ResultT | Exception]:
    """Yield what `work` returns for each item, or the exception that it raises, in the order in which they arrive.

    `at_once` threads work. They are daemons: those of a ThreadPoolExecutor would let Ctrl-C wait for them. When the
    caller stops asking, no further item is begun.
    """
    waiting: queue.SimpleQueue[ItemT] = queue.SimpleQueue()
    results: queue.SimpleQueue[ResultT | Exception] = queue.SimpleQueue()
    stopped = threading.Event()
    for item in items:
        waiting.put(item)

    def take() -> None:
        while not stopped.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results.put(work(item))
            except Exception as error:
                results.put(error)

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=take, daemon=True).start()
    try:
        for _ in items:
            yield results.get()
    finally:
        stopped.set()
