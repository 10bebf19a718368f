"""Tests that use a GPU, each process on a share of its own.

    pip install 'aiogpu[testing]' pytest-xdist scikit-learn torch
    pytest -n 4 -p aiogpu.testing.gpus --gpus 0.25 examples/models/test_share.py

Four processes run at once on one GPU, and each sees that GPU as `cuda:0`. The variable
is set before torch is imported, so the tests need not know of aiogpu.
"""

import os

import pytest
import torch
from sklearn.datasets import load_digits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32, device=DEVICE)
    return x, torch.tensor(labels, device=DEVICE)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    return torch.nn.Sequential(*layers).to(DEVICE)


def test_this_process_has_one_gpu() -> None:
    assert "," not in os.environ["CUDA_VISIBLE_DEVICES"]
    assert torch.cuda.device_count() <= 1


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1])
def test_the_loss_falls(digits: tuple[torch.Tensor, torch.Tensor], rate: float) -> None:
    net, (x, y) = model(), digits
    optimizer = torch.optim.Adam(net.parameters(), rate)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_batch_gives_what_single_images_give(
    digits: tuple[torch.Tensor, torch.Tensor],
) -> None:
    net, (x, _) = model().eval(), digits
    with torch.inference_mode():
        together = net(x[:8])
        apart = torch.cat([net(image[None]) for image in x[:8]])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
