"""aiogpu beside its peers, in one run: `python -m benchmarks.field`.

Question: how much time and memory do aiogpu, ProcessPoolExecutor, loky, Dask, xoscar
and Ray need for the same work on one machine? Each system is a program of its own, and
all take turns, block by block. The floor is the least that the work can cost.
"""
