"""Preloaded into a zygote: this import creates named shared memory."""

import os
from multiprocessing.shared_memory import SharedMemory

memory = SharedMemory(name=os.environ["MEMORY_NAME"], create=True, size=1000)
