"""A mixed load under kills: `python -m benchmarks.soak --minutes 2 --seed 11`.

Question: do aiogpu's promises hold while everything happens at once? Programs use all
of aiogpu while their processes are killed, on a node of their own and on a service.
Every handle must end once and legally, no share may be held twice, and nothing may grow
or be left behind. Each claim is checked again and again; a failure is printed.
"""
