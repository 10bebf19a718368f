"""Runs: the child processes. Zygote, keepers and workers live here.

They know messages and nothing of schedulers. No asyncio is imported until a
coroutine comes, which keeps the round trip and the fork short.
"""
