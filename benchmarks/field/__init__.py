"""aiogpu beside its peers, in one run: `python -m benchmarks field`.

Each system is a contestant: a program of its own, with all that it starts below a
warden that ends it. They are asked the same questions and take turns, block by block.
"""
