"""Taskiq queues the jobs; the node that all workers share hands out the GPUs.

    aiogpu start --head --num-gpus=1
    taskiq worker --app-dir examples 25_taskiq:broker
    aiogpu stop

A job awaits its task on the worker's event loop, so a cancelled job stops its task. Put
a broker of your own in place of the one in memory; this file as a program is its own
worker.
"""

from taskiq import InMemoryBroker, TaskiqEvents, TaskiqState

import aiogpu

broker = InMemoryBroker()


@broker.on_event(TaskiqEvents.WORKER_STARTUP)
async def join(_: TaskiqState) -> None:
    """Join the node when a process of the worker starts."""
    await aiogpu.init(address="auto")


@broker.on_event(TaskiqEvents.WORKER_SHUTDOWN)
async def leave(_: TaskiqState) -> None:
    """Leave the node: what still runs for this process is stopped."""
    await aiogpu.shutdown()


@aiogpu.remote(num_gpus=0.5, max_calls=0)
def embed(text: str) -> tuple[int, int]:
    """Run on half a GPU, in a worker of the node."""
    return len(text), len(aiogpu.get_gpu_ids())


@broker.task(timeout=60)
async def job(text: str) -> tuple[int, int]:
    """Run a job of the queue; its timeout stops the task as well."""
    return await embed.remote(text)


async def main() -> None:
    await broker.startup()
    jobs = [await job.kiq("x" * size) for size in range(1, 5)]
    for queued in jobs:
        result = await queued.wait_result(timeout=60)
        length, gpus = result.return_value
        print(f"{length} on {gpus} GPU")
    await broker.shutdown()


if __name__ == "__main__":
    aiogpu.run(main())
