"""What a program is told that wants a Ray cluster where Ray is not installed."""

from __future__ import annotations

from tests.support import program


def test_it_is_told_how_to_install_it():
    out = program.run(
        """
        import asyncio, sys
        sys.modules["ray"] = None
        import aiogpu

        async def main():
            try:
                await aiogpu.init(address="ray")
            except aiogpu.errors.NodeError as error:
                print(error)

        asyncio.run(main())
        """
    )
    assert out.count("Ray is not installed here") == 1
    assert out.count("pip install 'aiogpu[ray]'") == 1
