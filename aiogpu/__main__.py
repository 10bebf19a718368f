"""`python -m aiogpu` is the `aiogpu` command."""

from __future__ import annotations

from aiogpu.cli.main import main

if __name__ == "__main__":
    main()
