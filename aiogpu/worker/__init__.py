"""The child processes of a node: zygote, keepers and workers.

They exchange messages with the driver and know nothing of schedulers. asyncio is
imported only for a task's first coroutine, which keeps round trips and forks short.
"""
