"""A program's garbage collector is the program's: aiogpu never changes it ([B2])."""

from __future__ import annotations

from tests.support.program import run

PROGRAM = """
    import asyncio, gc

    called = []
    def note(name):
        setattr(gc, name, lambda *_: called.append(name))
    for name in ("disable", "enable", "freeze", "unfreeze", "set_threshold"):
        note(name) if MODE == "calls" else None

    class Young: ...

    async def main():
        young = Young()
        import aiogpu
        task = aiogpu.remote(abs)
        async with aiogpu.init(num_cpus=1, num_gpus=1):
            assert await task.remote(-1) == 1
            assert await task.options(num_gpus=1).remote(-1) == 1
        return [
            generation for generation in range(3)
            if any(one is young for one in gc.get_objects(generation))
        ]

    if MODE == "ages":
        gc.set_threshold(1 << 30)  # collects nothing by itself, and is switched on
    print(asyncio.run(main()), called)
"""


def test_no_setting_of_the_collector_is_touched() -> None:
    told = run(PROGRAM.replace("MODE", "'calls'"))
    assert told.strip().endswith("[]"), told


def test_a_young_object_is_as_young_after_a_start_and_two_tasks() -> None:
    assert run(PROGRAM.replace("MODE", "'ages'")).strip() == "[0] []"
