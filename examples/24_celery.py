"""Celery queues the jobs; the node that all workers share hands out the GPUs.

    aiogpu start --head --num-gpus=1
    celery --workdir examples -A 24_celery worker --concurrency 8
    aiogpu stop

With a broker of your own, eight processes of Celery wait for jobs, and as many of these
run at once as have room. This file as a program is its own worker, with threads.
"""

import os

from celery import Celery, Task
from celery.contrib.testing.worker import start_worker
from celery.signals import worker_process_init, worker_process_shutdown

import aiogpu.sync as gpu
from aiogpu import WorkerDiedError

app = Celery("jobs", broker=os.environ.get("BROKER", "memory://"))
app.conf.result_backend = os.environ.get("RESULTS", "cache+memory://")


@worker_process_init.connect
def join(**_: object) -> None:
    """Join the node in each process of the worker, after the fork."""
    gpu.init(address="auto")


@worker_process_shutdown.connect
def leave(**_: object) -> None:
    """Leave the node: what still runs for this process is stopped."""
    gpu.shutdown()


@gpu.remote(num_gpus=0.5, max_calls=0)
def embed(text: str) -> tuple[int, int]:
    """Run on half a GPU, in a worker of the node."""
    return len(text), len(gpu.get_gpu_ids())


@app.task(bind=True, autoretry_for=(WorkerDiedError,), max_retries=3)
def job(self: Task, text: str) -> tuple[int, int]:
    """Run a job of the queue; a task that takes too long is stopped."""
    named = embed.options(name=f"job {self.request.id}", timeout=60)
    return gpu.get(named.remote(text))


def main() -> None:
    join()
    with start_worker(app, pool="threads", concurrency=4, perform_ping_check=False):
        results = [job.delay("x" * size) for size in range(1, 5)]
        for result in results:
            length, gpus = result.get(timeout=60)
            print(f"{length} on {gpus} GPU")
    leave()


if __name__ == "__main__":
    main()
