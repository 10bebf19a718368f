"""A mixed load under fire: `python -m benchmarks.soak --minutes 2 --seed 11`.

Programs do all that aiogpu can while their processes are killed, on a node of their own
and on a service. Whatever happens, handles end once and in a legal way, and nothing
grows or is left. A claim that fails is told in words.
"""
