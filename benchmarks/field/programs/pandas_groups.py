"""A group-by of pandas."""

import pandas as pd


def work(number: int) -> float:
    """Sum a small table by groups; return the largest sum."""
    frame = pd.DataFrame({"key": [i % 7 for i in range(1000)], "value": range(1000)})
    return float(frame.groupby("key")["value"].sum().max() + number)
