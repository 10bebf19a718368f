"""Batch inference: files are loaded on CPUs, a model runs on shares of a GPU.

Each task loads one file; a pool of two actors, which hold the model, takes the arrays
from shared memory. `map` begins `limit` loads ahead of the results and no more. The
model is PyTorch's where PyTorch is installed, otherwise numpy's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import aiogpu

FILES, ROWS, COLUMNS = 24, 256, 32


@aiogpu.remote
def load(number: int) -> np.ndarray:
    """Stands for a file that is read and decoded."""
    rng = np.random.default_rng(number)
    return rng.normal(number, 1, (ROWS, COLUMNS)).astype(np.float32)


class Model:
    def __init__(self) -> None:
        self.model: Callable[[np.ndarray], Any]
        try:
            import torch
        except ImportError:
            self.model = lambda batch: np.tanh(batch).mean()
        else:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self.model = lambda batch: torch.tensor(batch, device=device).tanh().mean()

    def predict(self, batch: np.ndarray) -> float:
        return float(self.model(batch))


Models = aiogpu.remote(num_gpus=0.5)(Model)


def loaded() -> Iterator[aiogpu.Handle[np.ndarray]]:
    for number in range(1, FILES + 1):
        yield load.remote(number)  # a handle: the array goes straight to the actor


async def main() -> None:
    async with (
        aiogpu.init(num_cpus=4, num_gpus=1, preload=("numpy",)),
        aiogpu.ActorPool(Models, 2) as pool,
    ):
        means = [mean async for mean in pool.predict.map(loaded(), limit=8)]
    print(len(means), "files; the first:", [round(mean, 2) for mean in means[:3]])


if __name__ == "__main__":
    aiogpu.run(main())
