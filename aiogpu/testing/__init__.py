"""Tools for tests of programs that use aiogpu.

`aiogpu.testing.fixtures` has fixtures for pytest, and is the only module that needs
pytest.
"""
