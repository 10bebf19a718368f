"""A backend of joblib, and so of scikit-learn: `pip install 'aiogpu[joblib]'`.

Importing this module registers the backend under the name "aiogpu".
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from aiogpu import sync
from aiogpu.client.current import is_in_task
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
        inner_max_num_threads: threads that libraries in a task use; default `num_cpus`.
        **options: options of a task, such as `num_cpus=2`.

    Inside a task the same name stands for threads of the task's process.

    Raises:
        OptionError: an option is unknown or invalid.

    Example:
        `with joblib.parallel_config("aiogpu", num_cpus=1): Parallel(n_jobs=-1)(calls)`
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads
        )
        self._options = options
        self._executor = sync.Executor(**options)
        # joblib's callback submits the next calls, and would block the node's loop.
        self._callbacks = ThreadPoolExecutor(1, "aiogpu-joblib")
        self._pending: set[Future[Any]] = set()

    def configure(self, n_jobs: int = 1, parallel: Any = None, **settings: Any) -> int:
        """Prepare for calls of `parallel`; return how many run at once."""
        # joblib sets the number of threads after it has made the backend.
        if self.inner_max_num_threads is not None:
            threads = {"OMP_NUM_THREADS": str(self.inner_max_num_threads)}
            env = dict(self._options.get("runtime_env") or {})
            env["env_vars"] = threads | dict(env.get("env_vars") or {})
            self._executor = sync.Executor(**{**self._options, "runtime_env": env})
        count: int = super().configure(n_jobs, parallel, **settings)
        return count

    def get_nested_backend(self) -> tuple[Nested, None]:
        """Return the backend of `Parallel` inside the calls."""
        return Nested(nesting_level=(self.nesting_level or 0) + 1), None

    def terminate(self) -> None:
        """Forget the batch size, which suits the calls of one `Parallel`."""
        self.reset_batch_stats()

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


class Nested(parallel.ThreadingBackend):  # type: ignore[misc]
    """Runs `Parallel` inside a task, in threads of the task's process.

    joblib sends it with the calls. So workers import this module, and know the name.
    """


def _backend(**settings: Any) -> Backend | Nested:
    return Nested(**settings) if is_in_task() else Backend(**settings)


parallel.register_parallel_backend("aiogpu", _backend)
