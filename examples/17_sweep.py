"""A sweep with early stopping: trials report their loss, and bad ones are cancelled.

There may be more trials than places: the place of one that is stopped goes to the next.
The bars of all trials, or a table, would be drawn from the same reports.
"""

import asyncio
import itertools

import aiogpu

RATES = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 0.9, 0.999)
RUNG, ENOUGH = 10, 0.5


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


async def follow(trial: aiogpu.Handle[str]) -> str:
    """Stop a trial whose loss is too high at the rung; else return its result."""
    async for report in trial.reports():
        is_bad = report["step"] == RUNG and report["loss"] > ENOUGH
        if is_bad and trial.cancel():
            return f"stopped at step {RUNG}, loss {report['loss']:.2f}"
    return await trial


async def main() -> None:
    async with aiogpu.init(num_gpus=1, num_cpus=4):
        # With names of their own, `aiogpu status` and `top` tell the trials apart.
        trials = [train.options(name=f"rate {rate}").remote(rate) for rate in RATES]
        ends = await asyncio.gather(*map(follow, trials))
    for rate, end in zip(RATES, ends, strict=True):
        print(f"rate {rate}: {end}")


if __name__ == "__main__":
    aiogpu.run(main())
