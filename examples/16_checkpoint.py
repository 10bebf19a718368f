"""A training that saves its state when its program is stopped, and goes on from there.

python examples/16_checkpoint.py state.txt 1000    # 1000 steps
kill -TERM PID                                     # as Slurm and Kubernetes do
python examples/16_checkpoint.py state.txt 1000    # the rest of them
"""

import os
import sys
import time
from pathlib import Path

import aiogpu


def load(path: Path) -> int:
    """The number of steps that were done before."""
    return int(path.read_text()) if path.exists() else 0


def save(path: Path, step: int) -> None:
    """Replace the state as a whole: whoever is killed amid this leaves the old one."""
    new = path.with_suffix(".new")
    new.write_text(str(step))
    os.replace(new, path)


@aiogpu.remote(num_gpus=1, stop_grace=20)
def train(path: Path, steps: int) -> int:
    """Do the steps that are left; when the program stops, save within 20 seconds."""
    context = aiogpu.get_runtime_context()
    begun = load(path)
    print("goes on from its state" if begun else "begins")
    for step in range(begun, steps):
        time.sleep(0.01)  # a step of the training
        if context.is_stopping:
            save(path, step + 1)
            print("has saved its state")
            return step + 1
    return steps


async def main() -> None:
    """Train; a SIGTERM ends this with exit code 143."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} FILE STEPS, for example state.txt 1000")
    path, steps = Path(sys.argv[1]), int(sys.argv[2])
    async with aiogpu.init(num_gpus=1):
        done = await train.remote(path, steps)
        print("all steps are done" if done == steps else f"{done} steps are done")


if __name__ == "__main__":
    aiogpu.run(main())
