"""A mixed load under kills: `python -m benchmarks.soak --minutes 2 --seed 11`.

Question: do aiogpu's promises hold while everything happens at once? Programs do all
that aiogpu can while their processes are killed, on a node of their own and on a
service. Handles must end once and in a legal way, no share may be held twice, and
nothing may grow or be left. Each claim is checked again and again; a failure is shown.
"""
