"""The words of documents and source are those of the field. CONTRIBUTING's table lists old words and replacements."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "examples/**/*.md")
PLACES = (*DOCUMENTS, "src/fewbytes/**/*.py", "src/fewbytes/**/templates/**/*.*", "examples/**/*.py")
"""The checked files."""
DIALECT = {
    "a page of it": r"\bmakes? a page of\b",
    "alike, unlike": r"\bor alike\b|\bunlike (?:clients|shares|speeds|things)\b",
    "anew": r"\banew\b",
    "bear": r"\bbears?\b(?! in mind)|\bbore\b",
    "blamed": r"\bblamed\b",
    "but once": r"\bbut once\b",
    "by itself": r"\bby (?:itself|themselves)\b",
    "card": r"\b(?:a|each|every|its|one|the|\w+'s) cards?\b(?! of)|\]\(fed\w+ card\b",
    "come to": r"\b(?:what|it|they) (?:\w+ )?(?:comes?|came) to\b|\bwhat came of\b",
    "dealt out": r"\bdealt\b|\bdeals? (?:it |them |data )?out\b",
    "gaps": r"\bgaps (?:between|of) (?:indices|ones|places)\b",
    "go by": r"\bgo(?:es)? by (?!a schedule)",
    "go on": r"\bgo(?:es|ing|ne)? on\b|\bwent on\b",
    "in the mean over": r"\bin the mean over\b",
    "is no, are no": r"(?<!there )(?<!which )(?<!here )\b(?:is|was|are|were) no (?!promise|such|\w*er\b|less|more)\w+",
    "law, room": r"\ba law (?:checks|of)\b|\b(?:all|the) laws\b|\b(?:same|into) rooms\b|\brooms that\b",
    "left alone": r"\bleft alone\b",
    "levels": r"\b(?:how large|a tensor's|coded|quantised) levels\b",
    "lie, liar": r"\b(?:liars?|lied)\b|\blying client|\b(?:client|frame|replie|server)s? (?:that |who )?lies?\b",
    "mend": r"\bmend(?:s|ed)?\b",
    "nobody trains on": r"\bwhich nobody trains on\b",
    "one model for all": r"\bthe one model for all\b|\bmodel that all share\b",
    "perhaps": r"\bperhaps\b",
    "said": r"\b(?:and|are|be|been|is|was|were) said\b",
    "slips": r"\bslips?\b",
    "so many": r"\b(?:first|last) so many\b|\b(?:every|for|of|over|to) so many (?:bits|digits|seconds|rounds)\b",
    "strange": r"\bstrange\b",
    "takes no part": r"\bt(?:akes?|ook) no part\b",
    "tells": r"\btells? (?:all|how|of|what|yours)\b|\brounds tell\b",
    "to the bit": r"\bto the bit\b",
    "told": r"\btold(?= ?[,.;:)]| in a note| at (?:first|the end))|\bunless told otherwise\b",
    "what goes wrong": r"\bwhat goes wrong\b",
    "who is there": r"\bwho is there\b",
    "who, what as a subject": r"(?<=[.:;] )Who (?!are|can|did|does|is|may|sees)\w+ \w",
}
"""By row of CONTRIBUTING's table the old word, with the context that makes it dialect."""


def prose(path: Path) -> str:
    """A file's text in one line: Markdown without code, only the changelog's first section, Python's prose."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        text = python_prose(text)
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    if path.name == "CHANGELOG.md":
        text = text.split("\n## ")[1]
    if path.name == "CONTRIBUTING.md":
        text = re.sub(r"\n## Words\n.*?(?=\n## )", "", text, flags=re.DOTALL)
    return " ".join(text.split())


def python_prose(source: str) -> str:
    """The strings of several words (docstrings, messages, help), and the comments of Python code."""
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    texts = [text for text in strings if isinstance(text, str) and len(text.split()) > 1]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return " |\n".join([*texts, *(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)])


def old_words(text: str) -> list[str]:
    """The old words in a text, each with its context."""
    found = (match for pattern in DIALECT.values() for match in re.finditer(pattern, text, re.IGNORECASE))
    return [text[max(0, match.start() - 30) : match.end() + 30] for match in found]


FILES = sorted({path for place in PLACES for path in ROOT.glob(place)})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_has_none_of_the_old_words(path):
    assert not old_words(prose(path))


def test_every_old_word_is_a_row_of_the_table_with_its_replacement():
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("\n## Words\n")[2].partition("\n## ")[0]
    assert DIALECT.keys() <= set(re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE))


@pytest.mark.parametrize(
    "text",
    [
        "The digits are dealt out to ten clients.",
        "Rules that bear liars.",
        "The same command goes on.",
        "The rate is drawn anew. Who copies these files undoes that.",
        "What differs is told at the end.",
        "This file is no table. Values are no numbers. Results are equal to the bit.",
    ],
)
def test_an_old_word_is_found(text):
    assert old_words(text)


def test_the_prose_of_code_is_its_strings_of_several_words_and_comments():
    code = '''def told(anew):\n    """Perhaps so."""\n    print("strange")  # a liar\n\n\nX = 1\n"""Is told."""\n'''
    assert sorted(python_prose(code).split(" |\n")) == ["Is told.", "Perhaps so.", "a liar"]


def test_honest_uses_are_not_counted():
    assert not old_words("There is no file. The node is no longer a member. It is no more accurate.")
    assert not old_words("Splits at any level of a tree. A graphics card. Files lie beside each other. Who is asked?")
