"""Shares of GPUs: how they are packed, what waits, what can never run.

`num_gpus` of the node is logical: this runs on a machine without any GPU.
"""

import aiogpu


@aiogpu.remote
def where() -> list[int | str]:
    return aiogpu.get_gpu_ids()


async def show_node() -> None:
    node = await aiogpu.status()
    for device in node.devices:
        shares = [holder.share for holder in device.holders]
        print(f"  GPU {device.id}: held {shares}, free {device.free:g}")
    for task in node.waiting:
        print(f"  {task.name} {task.reason}")


async def main() -> None:
    async with aiogpu.init(num_cpus=16, num_gpus=3):
        print("Three halves on three GPUs: the fullest with room comes first.")
        halves = [where.options(num_gpus=0.5).remote() for _ in range(3)]
        await show_node()
        print("  they ran on", [await half for half in halves])

    async with aiogpu.init(num_cpus=16, num_gpus=2):
        print("A share is of one GPU: 0.5 waits while two have 0.4 free.")
        tasks = [where.options(num_gpus=0.6).remote() for _ in range(2)]
        tasks.append(where.options(num_gpus=0.5, name="half").remote())
        await show_node()

        print("Whole GPUs must be entirely free.")
        print("  two whole ones:", await where.options(num_gpus=2).remote())
        print("Ten tenths fit on one GPU.")
        tenths = [where.options(num_gpus=0.1).remote() for _ in range(10)]
        print(
            "  they ran on", {gpu for ids in [await t for t in tenths] for gpu in ids}
        )
        try:
            where.options(num_gpus=3).remote()
        except aiogpu.InfeasibleError as error:
            print(f"Three are never there:\n  {error}")


if __name__ == "__main__":
    aiogpu.run(main())
