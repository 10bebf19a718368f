"""A sweep with early stopping: trials report their loss, the worst are cancelled.

The bars of all trials, or a table, would be drawn from the same reports.
"""

import asyncio
import itertools

import aiogpu

RUNG = 10


@aiogpu.remote(num_gpus=0.25)
async def train(rate: float) -> str:
    x = 1.0
    for step in itertools.count(1):
        x -= rate * 2 * x
        aiogpu.report(step=step, loss=x * x)
        if x * x < 1e-3:
            break
        await asyncio.sleep(0.005)
    return f"converged in {step} steps"


async def loss_at(trial: aiogpu.Handle[str], step: int) -> float:
    async for report in trial.reports():
        if report["step"] == step:
            return float(report["loss"])
    await trial  # it has ended before: raise why, if it has failed
    return 0.0


async def main() -> None:
    async with aiogpu.init(num_gpus=1, num_cpus=4):
        trials = {rate: train.remote(rate) for rate in (0.001, 0.01, 0.05, 1.0)}
        losses = await asyncio.gather(*(loss_at(one, RUNG) for one in trials.values()))
        ranked = sorted(zip(losses, trials, strict=True))
        for loss, rate in ranked[len(ranked) // 2 :]:
            trials[rate].cancel()
            print(f"rate {rate}: stopped at step {RUNG}, loss {loss:.2f}")
        for _, rate in ranked[: len(ranked) // 2]:
            print(f"rate {rate}: {await trials[rate]}")


if __name__ == "__main__":
    aiogpu.run(main())
