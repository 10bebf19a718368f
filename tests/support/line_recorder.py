"""Marks the lines of `aiogpu/` that this process executes, in memory that a run shares.

Not imported: `line_map` has a copy of `aiogpu/__init__.py` execute this source with
`PLACE`, the copy's folder. A mark outlives its process, however that ends.
"""

import marshal
import mmap
import os
import sys


def record(place: str) -> None:
    """Mark lines from now on, here and in what this process forks."""
    monitoring = sys.monitoring
    tool = monitoring.COVERAGE_ID
    if monitoring.get_tool(tool) is not None:
        return
    with open(f"{place}/lines.index", "rb") as index:
        starts: dict[str, int] = marshal.load(index)
    with open(f"{place}/lines.page", "r+b") as file:
        # Tests compare the descriptors before and after, so none is kept.
        page = mmap.mmap(file.fileno(), 0, trackfd=False)

    def on_line(code, line):  # type: ignore[no-untyped-def]
        start = starts.get(code.co_filename)
        if start is not None:
            page[start + line] = 1
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "line_map")
    monitoring.register_callback(tool, monitoring.events.LINE, on_line)
    monitoring.set_events(tool, monitoring.events.LINE)
    os.register_at_fork(after_in_child=monitoring.restart_events)


record(PLACE)  # type: ignore[name-defined]  # noqa: F821
