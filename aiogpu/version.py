"""The version of aiogpu.

A module of its own, so that any layer can name it without importing the public names of
the package.
"""

__version__ = "0.1.0"
