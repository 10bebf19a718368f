"""The site stays short: pages, words written by hand, cells of tables, sentences.

`python -m tests.docs.test_site` prints the words of each page.
"""

import re
from pathlib import Path

import pytest

from tests.docs.test_api_page import TABLE
from tests.docs.test_generated_pages import GENERATED

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
GENERATED_PAGES = {"service-json.md"}
MOST_PAGES = 30
MOST_WORDS = 22_000
LONGEST_CELL = 120
BLOCK = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\|(.*)\|$", re.MULTILINE)
LINK = re.compile(r"\]\([^)]*\)")


def by_hand(name: str) -> str:
    """The text of a page without code blocks and without what is generated."""
    if name in GENERATED_PAGES:
        return ""
    text = TABLE.sub("", PAGES[name].partition(GENERATED)[0])
    return BLOCK.sub("", text)


def words(name: str) -> int:
    """How many words of a page are written by hand, programs left out."""
    return len(by_hand(name).split())


def cells(name: str) -> list[str]:
    """The cells of the tables of a page as a reader sees them."""
    rows = ROW.findall(by_hand(name))
    return [
        LINK.sub("]", cell).strip()
        for row in rows
        for cell in re.split(r"(?<!\\)\|", row)
    ]


def test_the_site_has_few_pages() -> None:
    assert len(PAGES) <= MOST_PAGES


def test_the_site_has_few_words() -> None:
    assert sum(map(words, PAGES)) <= MOST_WORDS


@pytest.mark.parametrize("name", PAGES)
def test_cells_of_tables_are_short(name: str) -> None:
    assert [cell for cell in cells(name) if len(cell) > LONGEST_CELL] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_what_the_reader_gets(name: str) -> None:
    """After the title comes a paragraph, not a heading, a table, a list or code."""
    title, _, rest = PAGES[name].partition("\n\n")
    assert re.fullmatch(r"# .+", title)
    assert re.match(r"(?!```)[\w`*\[@]", rest), rest[:80]


if __name__ == "__main__":
    for each in sorted(PAGES, key=words):
        print(f"{words(each):6} {each}")
    print(f"{sum(map(words, PAGES)):6} in {len(PAGES)} pages")
