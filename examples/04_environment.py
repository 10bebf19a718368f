"""What a task sees of its assignment: ids, variables, its own facts.

The variables are set before anything of yours is imported in the worker, so
`torch.device("cuda:0")` is always the right one.
"""

import asyncio
import os

import aiogpu


@aiogpu.remote(num_gpus=1)
def look() -> dict[str, object]:
    context = aiogpu.get_runtime_context()
    return {
        "get_gpu_ids()": aiogpu.get_gpu_ids(),
        "get_accelerator_ids()['GPU']": context.get_accelerator_ids()["GPU"],
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER"),
        "MODE": os.environ.get("MODE"),
        "task_name": context.task_name,
        "assigned_resources": context.assigned_resources,
    }


async def main() -> None:
    own = {"env_vars": {"MODE": "fast"}}
    alone = {"env_vars": {"AIOGPU_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    tasks = {
        "one GPU": look,
        "another": look,
        "two": look.options(num_gpus=2, name="big"),
        "none": look.options(num_gpus=0),
        "a variable of its own": look.options(runtime_env=own),
        "variables left alone": look.options(runtime_env=alone),
    }
    async with aiogpu.init(num_cpus=8, num_gpus=6):
        facts = await asyncio.gather(*(task.remote() for task in tasks.values()))
    for title, found in zip(tasks, facts, strict=True):
        print(title)
        for name, value in found.items():
            if value is not None:
                print(f"  {name} = {value!r}")
    print("outside of any task:", aiogpu.get_gpu_ids())


if __name__ == "__main__":
    aiogpu.run(main())
