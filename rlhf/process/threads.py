"""Work of several threads at once, such as requests to a server."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def results_of(work: Callable[[ItemT], ResultT], items: Sequence[ItemT], at_once: int) -> Iterator[ResultT | Exception]:
    """Yield what `work` returns for each item, or the exception that it raises, in the order in which they arrive.

    When the caller stops asking, no further item is begun.
    """

    def take(item: ItemT) -> ResultT | Exception:
        try:
            return work(item)
        except Exception as error:
            return error

    pool = ThreadPoolExecutor(at_once)
    try:
        yield from (done.result() for done in as_completed([pool.submit(take, item) for item in items]))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
