"""Hook of the site: whole docstrings below the tables of names.

`mkdocs.yml` names this file; see
https://www.mkdocs.org/user-guide/configuration/#hooks.
"""

from __future__ import annotations

import re
from typing import Final

from mkdocs.structure.pages import Page

NAME: Final = re.compile(r"^\| `(aiogpu\.[\w.]+)` \|", re.MULTILINE)
LINKED: Final = re.compile(r"^\| \[`(aiogpu\.[\w.]+)`\]", re.MULTILINE)
TABLE: Final = re.compile(r"^\| name .*\n(?:\|.*\n?)+", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Add the whole docstrings below each table of the page of the API.

    On a forge the page is its tables.
    """
    if page.file.src_path != "api.md":
        return markdown
    linked = NAME.sub(r"| [`\1`](#\1) |", markdown)
    return TABLE.sub(
        lambda table: (
            table[0] + "".join(f"\n::: {name}\n" for name in LINKED.findall(table[0]))
        ),
        linked,
    )
