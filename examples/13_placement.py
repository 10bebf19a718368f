"""Two ranks that begin together, and what feeds them: a placement of three bundles."""

import asyncio

import aiogpu


@aiogpu.remote(num_gpus=1)
class Rank:
    """One rank of a training run."""

    def __init__(self, number: int) -> None:
        self.number = number

    def step(self, batch: list[int]) -> str:
        """Train on a batch."""
        gpu = aiogpu.get_gpu_ids()[0]
        return f"rank {self.number} on GPU {gpu} has seen {sum(batch)}"


@aiogpu.remote(num_gpus=0.5)
def load(number: int) -> list[int]:
    """Make a batch ready."""
    return list(range(number, number + 4))


async def main() -> None:
    """Ask for all three bundles at once, and use each of them."""
    async with aiogpu.init(num_cpus=4, num_gpus=3):
        bundles = [{"GPU": 1}, {"GPU": 1}, {"GPU": 0.5, "CPU": 1}]
        async with aiogpu.placement(bundles, strategy="SPREAD") as group:
            ranks = [Rank.options(placement=group, bundle=i).remote(i) for i in (0, 1)]
            batches = load.options(placement=group, bundle=2)
            steps = [rank.step.remote(batches.remote(i)) for i, rank in enumerate(ranks)]
            print(*await asyncio.gather(*steps), sep="\n")


if __name__ == "__main__":
    aiogpu.run(main())
