"""A sweep without an event loop, as it would be written for Ray.

`aiogpu.sync` has the names of `aiogpu`, which are most of those that Ray's programs
use: with `import ray` in place of its import, this file runs on Ray. Results are taken
as they come; an actor keeps what trials report.
"""

from typing import Any

import aiogpu.sync as ray


class Reports:
    """Keeps the last loss of each trial."""

    def __init__(self) -> None:
        self.losses: dict[float, float] = {}

    def add(self, rate: float, loss: float) -> None:
        self.losses[rate] = loss

    def best(self) -> float:
        return min(self.losses, key=lambda rate: self.losses[rate])


@ray.remote(num_gpus=0.5, max_calls=0)
def train(rate: float, reports: Any) -> tuple[float, float]:
    loss = 1.0
    for _ in range(10):
        loss *= 1 - rate  # here a model would learn
        ray.get(reports.add.remote(rate, loss))
    return rate, round(loss, 4)


def main() -> None:
    with ray.init(num_cpus=4, num_gpus=1):
        reports = ray.remote(Reports).remote()
        pending = [train.remote(rate, reports) for rate in (0.1, 0.2, 0.3, 0.4)]
        results = []
        while pending:
            (ended,), pending = ray.wait(pending)
            results.append(ray.get(ended))
        for rate, loss in sorted(results):
            print(f"rate {rate}: loss {loss}")
        print("best:", ray.get(reports.best.remote()))


if __name__ == "__main__":
    main()
