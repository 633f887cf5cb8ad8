"""The documentation holds together: links lead somewhere, and both languages of the cache guide say the same."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
ENGLISH = (ROOT / "docs/prompt-cache.md").read_text()
KOREAN = (ROOT / "docs/ko/prompt-cache.md").read_text()

FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)


def prose(text: str) -> str:
    return FENCED.sub("", text)


def anchors(text: str) -> set[str]:
    """What the headings are called in a link: lower case, no punctuation, hyphens for blanks."""
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in HEADING.findall(prose(text))}


def names(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z0-9-]*|\b(?:MLXCEL|LLAMA_ARG)_[A-Z_]+", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_to_a_heading_of_it(page):
    for link in LINK.findall(prose(page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_both_guides_have_the_same_sections():
    def numbers(text):
        return re.findall(r"^## (\d+)\.", prose(text), re.M)

    assert numbers(KOREAN) == numbers(ENGLISH)
    assert len(re.findall(r"^## ", prose(KOREAN), re.M)) == len(re.findall(r"^## ", prose(ENGLISH), re.M))


def test_both_guides_name_the_same_flags_and_variables():
    assert names(KOREAN) == names(ENGLISH)


def test_the_korean_guide_has_every_field_metric_reason_and_log_line_of_the_english_one():
    def literals(text):
        return {" ".join(literal.split()) for literal in re.findall(r"`([^`]+)`", prose(text))}

    assert literals(ENGLISH) <= literals(KOREAN)


def test_both_guides_show_the_same_code():
    assert FENCED.findall(KOREAN) == FENCED.findall(ENGLISH)


def test_each_guide_begins_with_a_link_to_the_other():
    assert "](ko/prompt-cache.md)" in ENGLISH.split("## ")[0]
    assert "](../prompt-cache.md)" in KOREAN.split("## ")[0]
