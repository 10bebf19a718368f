"""A fit of scikit-learn."""

import numpy as np
from sklearn.linear_model import Ridge


def work(number: int) -> float:
    """Fit a small linear model; return its score."""
    random = np.random.default_rng(number)
    x = random.normal(size=(200, 8))
    y = x.sum(axis=1) + random.normal(size=200)
    return float(Ridge(alpha=0.1).fit(x, y).score(x, y))
