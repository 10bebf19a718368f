"""Hooks of the site: diagrams are drawn by the copy of mermaid that the site contains.

The theme loads mermaid from another host on pages with diagrams. `mkdocs.yml` names
this file; see https://www.mkdocs.org/user-guide/configuration/#hooks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

FOREIGN: Final = re.compile(r"https://unpkg\.com/mermaid@\d+/dist/mermaid\.min\.js")
OWN: Final = "javascripts/mermaid.tiny.js"
"""As all pages lie in one folder, the path is the same from each."""


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
