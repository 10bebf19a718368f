"""Fixtures of this folder; other folders import them from `stub_fixtures`."""

from tests.unit.accelerators.stub_fixtures import nvml, stub_library

__all__ = ["nvml", "stub_library"]
