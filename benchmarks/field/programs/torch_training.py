"""A step of training with torch, whose optimisers import a part of torch late."""

import torch


def work(number: int) -> float:
    """Train a small model for one step; return the loss."""
    torch.manual_seed(number)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.item())
