"""The functions that a program has told Ray of, each once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiogpu.engines import ray
from aiogpu.engines.cluster.terms import options_of_task
from aiogpu.engines.cluster.work import Work, runner, streamer

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.engines.cluster.overview import Overview
    from aiogpu.engines.cluster.placements import Placements

SITES: Final = 1024
"""Functions that are kept ready; beyond, Ray is told of the oldest anew."""


class Functions:
    """See above, for one engine."""

    def __init__(self, placements: Placements, overview: Overview) -> None:
        self._placements = placements
        self._overview = overview
        self._sent: dict[int, Any] = {}

    def __repr__(self) -> str:
        return f"<Functions {len(self._sent)}>"

    def of(self, site: Site) -> Any:
        """Return what Ray knows a site by."""
        found = self._sent.get(site.id)
        if found is None:
            work = Work(site, self._overview.kinds())
            run = streamer(work) if site.window else runner(work)
            if len(self._sent) >= SITES:
                del self._sent[next(iter(self._sent))]
            request = site.spec.shape.request
            options = self._placements.placed(options_of_task(site), request)
            found = self._sent[site.id] = ray.function(run, options)
        return found
