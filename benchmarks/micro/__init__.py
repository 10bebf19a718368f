"""The cost of one operation of aiogpu, beside its floor: `python -m benchmarks.micro`.

Question: how far is each operation (a call, an item of a stream, a value, an actor, a
fresh process, a cancel, a scheduling decision …) from the least that the machine
allows, and does it meet its goal? Floor and workload run in turn, in one process.
"""
