"""What one operation of aiogpu costs, beside its floor: `python -m benchmarks.micro`.

Question: how far is each operation (a call, a stream's item, a value on its way, an
actor, a fresh process, a cancel, a decision of the scheduler …) from the least that
the machine allows, and does it meet its goal? Floor and workload run in turn, in one
process.
"""
