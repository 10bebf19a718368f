"""What aiogpu costs, beside what the machine allows: `python -m benchmarks`.

Workloads know nothing of the system that they run on, environments know no
workload; they meet in `port`. Kept empty of imports: workers import `tasks` from here.
"""
