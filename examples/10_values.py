"""A pipeline by handles: load, preprocess, train; then the best one.

Arrays lie in shared memory, go from task to task, and never come through this process.
The weights are put once, for all who train. Install numpy by:
pip install 'aiogpu[demo]'.
"""

import asyncio

import numpy as np

import aiogpu

ROWS = 200_000


@aiogpu.remote
def load(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(seed, 1, (ROWS, 4))


@aiogpu.remote(num_returns=2)
def preprocess(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    table = table - table.mean(axis=0)  # what was loaded is read-only, this is new
    return table[: ROWS // 2].copy(), table[ROWS // 2 :].copy()


@aiogpu.remote(num_gpus=0.25)
def train(table: np.ndarray, weights: np.ndarray, rate: float) -> np.ndarray:
    for _ in range(10):
        weights = weights - rate * (table.T @ (table @ weights)) / len(table)
    return weights


@aiogpu.remote
def loss(table: np.ndarray, weights: np.ndarray) -> float:
    return float(np.mean((table @ weights) ** 2))


async def main() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1, preload=("numpy",)):
        start = aiogpu.put(np.ones(4))
        for seed in range(2):
            for_training, for_testing = preprocess.remote(load.remote(seed))
            rates = (0.01, 0.1, 0.3)
            trained = [train.remote(for_training, start, rate) for rate in rates]
            losses = [loss.remote(for_testing, weights) for weights in trained]
            # Nothing was awaited so far: here only these numbers arrive.
            found = dict(zip(rates, await asyncio.gather(*losses), strict=True))
            best = min(found, key=found.__getitem__)
            print(f"table {seed}: {found[0.01]:.2f}, {found[0.1]:.2f}; best {best}")


if __name__ == "__main__":
    aiogpu.run(main())
