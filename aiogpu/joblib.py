"""A backend of joblib, and so of scikit-learn: `pip install 'aiogpu[joblib]'`.

Importing this module registers the backend under the name "aiogpu".
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from aiogpu import sync
from aiogpu.errors import OptionError

try:
    from joblib import parallel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "aiogpu.joblib needs joblib: pip install 'aiogpu[joblib]'.", name=error.name
    ) from None

__all__ = ["Backend"]


class Backend(parallel.AutoBatchingMixin, parallel.ParallelBackendBase):  # type: ignore[misc]
    """Runs the calls of `joblib.Parallel` as tasks, on the node of `aiogpu.sync`.

    Args:
        nesting_level: set by joblib.
        inner_max_num_threads: refused; `num_cpus` sets the threads of a task.
        **options: options of a task, such as `num_cpus=2`.

    Raises:
        OptionError: an option is unknown or invalid.

    Example:
        `with joblib.parallel_config("aiogpu", num_cpus=1): Parallel(n_jobs=-1)(calls)`
    """

    supports_retrieve_callback = True

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        **options: Any,
    ) -> None:
        if inner_max_num_threads is not None:
            raise OptionError(
                f"the joblib backend of aiogpu has no option inner_max_num_threads; "
                f"write num_cpus={inner_max_num_threads}, which also sets the number "
                f"of threads that libraries in a task use."
            )
        super().__init__(nesting_level=nesting_level)
        self._executor = sync.Executor(**options)
        # joblib's callback submits the next calls, and would block the node's loop.
        self._callbacks = ThreadPoolExecutor(1, "aiogpu-joblib")
        self._pending: set[Future[Any]] = set()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many calls run at once; -1 means all CPUs of the node."""
        if n_jobs == 0:
            raise OptionError("n_jobs=0 is not allowed; write n_jobs=-1 for all CPUs.")
        if n_jobs is None or n_jobs > 0:
            return n_jobs or 1
        return max(1, int(sync.cluster_resources()["CPU"]) + 1 + n_jobs)

    def submit(
        self, func: Callable[[], Any], callback: Callable[[Any], object] | None = None
    ) -> Future[Any]:
        """Start a batch of calls."""
        future: Future[Any] = self._executor.submit(func)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        if callback is not None:
            future.add_done_callback(
                lambda ended: self._callbacks.submit(callback, ended)
            )
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """Return the results of a batch, or raise its error."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel all calls, after an error."""
        for future in list(self._pending):
            future.cancel()


parallel.register_parallel_backend("aiogpu", Backend)
