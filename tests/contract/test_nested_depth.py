"""[B12] How deep tasks may start tasks: each level costs four or five descriptors."""

from __future__ import annotations

import pytest

from tests.support.program import run

DEEP = """
    import asyncio, os, resource, aiogpu
    from tests.contract.nested_tasks import depth

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))

    async def main():
        async with aiogpu.init(num_cpus=1):
            print(await depth.remote(200))
            print(await depth.remote(20))

    aiogpu.run(main())
"""


@pytest.mark.slow
def test_two_hundred_levels_with_the_usual_limit(no_leaks: None) -> None:
    assert run(DEEP) == "200\n20\n"
