"""A data loader: generators on CPUs prepare batches while a task on the GPU trains.

Each generator is at most `max_buffered` batches ahead. The arrays go to the training
through shared memory. The generators are children of the training and end with it.
"""

from collections.abc import Iterator

import numpy as np

import aiogpu

TRUTH = np.array([1.0, 2.0, 3.0])
Batch = tuple[np.ndarray, np.ndarray]


@aiogpu.remote(max_buffered=4)
def load(shard: int, batches: int) -> Iterator[Batch]:
    """Stands for reading, decoding and augmenting the files of a shard."""
    rng = np.random.default_rng(shard)
    for _ in range(batches):
        inputs = rng.random((20_000, 3))
        yield inputs, inputs @ TRUTH


@aiogpu.remote(num_gpus=1)
def train(shards: int, batches: int) -> tuple[int, list[float]]:
    """Fit a linear model; here a network would learn on `cuda:0`."""
    steps, weights = 0, np.zeros(3)
    loaders = [load.remote(shard, batches) for shard in range(shards)]
    for group in zip(*loaders, strict=True):  # a batch of each shard
        for inputs, targets in group:
            errors = inputs @ weights - targets
            weights -= 0.5 * inputs.T @ errors / len(inputs)
            steps += 1
    return steps, [round(float(weight), 1) for weight in weights]


async def main() -> None:
    async with aiogpu.init(num_cpus=3, num_gpus=1, preload=("numpy",)):
        steps, weights = await train.remote(shards=2, batches=100)
        print(f"{steps} steps, learned {weights}")


if __name__ == "__main__":
    aiogpu.run(main())
