"""A Jupyter kernel for tests: runs cells, and says what each of them shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from jupyter_client.manager import KernelManager

LIMIT: Final = 60.0  # seconds, to end a hang


class Kernel:
    """A kernel, and the outputs of all its cells so far."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[dict[str, Any]]] = {}
        self._shown: dict[str, dict[str, Any]] = {}
        self._manager: Any = KernelManager(kernel_name="python3", transport="ipc")
        self._manager.start_kernel(env=dict(os.environ))
        self._client: Any = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LIMIT)

    def run(self, code: str) -> str:
        """Run a cell to its end; return its name for `text`, `html` and `errors`."""
        name: str = self._client.execute(code)
        while True:
            message = self._client.get_iopub_msg(timeout=LIMIT)
            cell, content = message["parent_header"].get("msg_id"), message["content"]
            self._note(cell, message["msg_type"], content)
            if cell == name and content.get("execution_state") == "idle":
                return name

    def _note(self, cell: str, kind: str, content: dict[str, Any]) -> None:
        shown = content.get("transient", {}).get("display_id")
        if kind == "update_display_data":
            self._shown[shown]["data"] = content["data"]
            return
        if shown:
            self._shown[shown] = content
        self.outputs.setdefault(cell, []).append({"kind": kind, "content": content})

    def _contents(self, cell: str, *kinds: str) -> list[dict[str, Any]]:
        found = self.outputs.get(cell, ())
        return [each["content"] for each in found if each["kind"] in kinds]

    def text(self, cell: str) -> str:
        """What was printed under a cell."""
        return "".join(content["text"] for content in self._contents(cell, "stream"))

    def html(self, cell: str) -> str:
        """What a cell shows as HTML."""
        shown = self._contents(cell, "execute_result", "display_data")
        return "\n".join(content["data"].get("text/html", "") for content in shown)

    def kinds(self, cell: str) -> set[str]:
        """The media types of what a cell shows."""
        shown = self._contents(cell, "execute_result", "display_data")
        return {kind for content in shown for kind in content["data"]}

    def errors(self, cell: str) -> str:
        """The tracebacks of a cell, without colours."""
        found = self._contents(cell, "error")
        return "\n".join(line for content in found for line in content["traceback"])

    def close(self) -> None:
        """End the kernel."""
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        self._manager.context.term()


@contextmanager
def kernel() -> Iterator[Kernel]:
    """Run a kernel in a block."""
    running = Kernel()
    try:
        yield running
    finally:
        running.close()
