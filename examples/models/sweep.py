"""A sweep with Optuna: trials on quarters of a GPU, live progress, early stopping.

    pip install aiogpu optuna scikit-learn torch
    python examples/models/sweep.py [TRIALS]

Optuna proposes the parameters and decides which trials are not worth going on with;
aiogpu runs four at a time, and the share of a stopped trial goes to the next one.
"""

import asyncio
import sys

import optuna
from rich.progress import BarColumn, Progress, TaskID, TextColumn

import aiogpu

EPOCHS = 30


@aiogpu.remote(num_gpus=0.25)
def train(rate: float, width: int, dropout: float) -> float:
    """Learn to read digits; return the part of unseen digits that is read right."""
    import torch
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32, device=device)
    y = torch.tensor(labels, device=device)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width),
        torch.nn.ReLU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(width, 10),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    accuracy = 0.0
    for epoch in range(EPOCHS):
        model.train()
        for batch in torch.randperm(1400, device=device).split(64):
            loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = model(x[1400:]).argmax(1) == y[1400:]
        accuracy = float(right.float().mean())
        aiogpu.report(epoch=epoch, accuracy=accuracy)
    return accuracy


async def run_trial(
    study: optuna.Study, progress: Progress, free: asyncio.Semaphore
) -> None:
    """Ask Optuna for parameters, train, and stop if Optuna sees no hope."""
    async with free:  # the next proposal knows the results so far
        trial = study.ask()
        rate = trial.suggest_float("rate", 1e-4, 0.3, log=True)
        width = trial.suggest_int("width", 16, 256, log=True)
        dropout = trial.suggest_float("dropout", 0.0, 0.6)
        bar: TaskID = progress.add_task(f"trial {trial.number}", total=EPOCHS, seen="")
        name = f"trial {trial.number}"
        call = train.options(name=name).remote(rate, width, dropout)
        async for report in call.reports():
            seen = f"{report['accuracy']:.1%}"
            progress.update(bar, completed=report["epoch"] + 1, seen=seen)
            trial.report(report["accuracy"], report["epoch"])
            if trial.should_prune():
                call.cancel()
                progress.update(bar, seen=f"{seen} stopped")
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                return
        study.tell(trial, await call)


async def main() -> None:
    trials = int(sys.argv[1]) if sys.argv[1:] else 12
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3),
    )
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        TextColumn("{task.fields[seen]}"),
    )
    free = asyncio.Semaphore(4)
    with Progress(*columns) as progress:
        async with aiogpu.init(num_cpus=4, num_gpus=1), asyncio.TaskGroup() as group:
            for _ in range(trials):
                group.create_task(run_trial(study, progress, free))
    print(f"the best: {study.best_value:.1%} with {study.best_params}")


if __name__ == "__main__":
    aiogpu.run(main())
