"""Hooks of the site: whole docstrings below tables of names, and mermaid's own copy.

The theme loads mermaid from another host on pages with diagrams. `mkdocs.yml` names
this file; see https://www.mkdocs.org/user-guide/configuration/#hooks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

NAME: Final = re.compile(r"^\| `(aiogpu\.[\w.]+)` \|", re.MULTILINE)
LINKED: Final = re.compile(r"^\| \[`(aiogpu\.[\w.]+)`\]", re.MULTILINE)
TABLE: Final = re.compile(r"^\| name .*\n(?:\|.*\n?)+", re.MULTILINE)
FOREIGN: Final = re.compile(r"https://unpkg\.com/mermaid@\d+/dist/mermaid\.min\.js")
OWN: Final = "javascripts/mermaid.tiny.js"
"""As all pages lie in one folder, the path is the same from each."""


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


def on_post_build(config: MkDocsConfig) -> None:
    """Let the theme's script load the site's own copy."""
    scripts = Path(config.site_dir, "assets/javascripts").glob("bundle.*.min.js")
    for script in scripts:
        text, count = FOREIGN.subn(OWN, script.read_text())
        if count:
            script.write_text(text)
            return
    raise PluginError(
        "the theme no longer loads mermaid as design/site_hooks.py expects"
    )
