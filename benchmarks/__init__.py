"""Benchmarks: what aiogpu costs, and whether it survives load. Each has a --help.

- `python -m benchmarks.micro`: the cost of one operation, beside its floor.
- `python -m benchmarks.field`: aiogpu beside Ray, Dask, loky, xoscar and executors.
- `python -m benchmarks.soak`: a mixed load under kills, with checks of all promises.
- `python -m benchmarks.simulation`: scheduling policies on a random load.
- `python -m benchmarks.counts`: calls, bytecodes and bytes of one operation.

With --keep, `micro`, `field` and `simulation` write their pages in benchmarks/results.

This module imports nothing: workers import `benchmarks.tasks`.
"""
