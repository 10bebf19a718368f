"""Two ranks that begin together, and what feeds them: a placement of three bundles."""

import asyncio

import aiogpu


@aiogpu.remote(num_gpus=1)
def train(rank: int, batch: list[int]) -> str:
    """Run one step of a rank."""
    gpu = aiogpu.get_gpu_ids()[0]
    return f"rank {rank} on GPU {gpu} has seen {sum(batch)}"


@aiogpu.remote(num_gpus=0.5)
def load(number: int) -> list[int]:
    """Make a batch ready."""
    return list(range(number, number + 4))


async def main() -> None:
    """Ask for all three bundles at once, and use each of them."""
    async with (
        aiogpu.init(num_cpus=4, num_gpus=3),
        aiogpu.placement([{"GPU": 1}, {"GPU": 1}, {"GPU": 0.5, "CPU": 1}]) as group,
    ):
        batches = [
            load.options(placement=group, bundle=2).remote(rank) for rank in (0, 1)
        ]
        steps = [
            train.options(placement=group, bundle=rank).remote(rank, batch)
            for rank, batch in enumerate(batches)
        ]
        print(*await asyncio.gather(*steps), sep="\n")


if __name__ == "__main__":
    aiogpu.run(main())
