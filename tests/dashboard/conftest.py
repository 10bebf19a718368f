"""The sandbox of the commands' tests."""

from tests.cli.conftest import sandbox

__all__ = ["sandbox"]
