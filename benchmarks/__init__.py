"""Benchmarks: what aiogpu costs, and whether it holds under load. Each has its --help.

- `python -m benchmarks.micro`: what one operation costs, beside its floor.
- `python -m benchmarks.field`: aiogpu beside Ray, Dask, loky, xoscar and executors.
- `python -m benchmarks.soak`: a mixed load under kills, and what must hold meanwhile.
- `python -m benchmarks.simulation`: scheduling policies on a drawn load.
- `python -m benchmarks.counts`: calls of functions an operation, compared by the tests.

`micro`, `field` and `simulation` write their pages in benchmarks/results by --keep.

Kept empty of imports: workers import `benchmarks.tasks`.
"""
