"""Scheduling policies on a drawn load: `python -m benchmarks.simulation`.

Question: what becomes of aiogpu's placement policy, and of its cost, with thousands of
GPUs and a million tasks? The same trace also runs under first fit and Ray's policy.
Time is simulated and no process is started.
"""
