"""Data-parallel training with torch: a gang of ranks, each on a GPU of its own.

    pip install aiogpu scikit-learn torch
    python examples/models/train_ddp.py [RANKS]

On GPUs the ranks talk by NCCL, without them by gloo. If a rank fails, all are started
again from the last checkpoint.
"""

import os
import sys
import tempfile
from pathlib import Path

import aiogpu

EPOCHS = 20


class Trainer:
    def __init__(self, folder: str) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        has_gpu = torch.cuda.is_available()
        torch.distributed.init_process_group("nccl" if has_gpu else "gloo")
        self.device = "cuda" if has_gpu else "cpu"  # the rank's own: it sees no other
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.path = Path(folder, "checkpoint.pt")
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        self.model = DistributedDataParallel(
            torch.nn.Sequential(*layers).to(self.device)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.epoch = 0
        if self.path.exists():
            saved = torch.load(self.path, map_location=self.device)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.epoch = saved["epoch"]

    def fit(self, epochs: int) -> tuple[int, float]:
        """Train on this rank's part of the digits; return its size and the accuracy."""
        import torch
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images / 16, dtype=torch.float32, device=self.device)
        y = torch.tensor(labels, device=self.device)
        mine = range(self.rank, 1400, self.size)
        while self.epoch < epochs:
            for start in range(0, len(mine), 32):
                rows = [*mine[start : start + 32]]
                output = self.model(x[rows])
                loss = torch.nn.functional.cross_entropy(output, y[rows])
                self.optimizer.zero_grad()
                loss.backward()  # DDP averages the gradients of all ranks here
                self.optimizer.step()
            self.epoch += 1
            if self.rank == 0:
                aiogpu.report(epoch=self.epoch, loss=loss.item())
                self.save()
        right = self.model(x[1400:]).argmax(1) == y[1400:]
        return len(mine), float(right.float().mean())

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        import torch

        state = {
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").rename(self.path)


async def main() -> None:
    ranks = int(sys.argv[1]) if sys.argv[1:] else 2
    with tempfile.TemporaryDirectory() as folder:
        async with (
            aiogpu.init(num_cpus=ranks, num_gpus=ranks),
            aiogpu.gang(
                Trainer, ranks, num_gpus=1, args=(folder,), max_restarts=2
            ) as gang,
        ):
            for rank, (rows, accuracy) in enumerate(await gang.call("fit", EPOCHS)):
                print(f"rank {rank}: {rows} digits, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    aiogpu.run(main())
