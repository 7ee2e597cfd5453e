"""The papers of a method, from its file's docstring, and their BibTeX entries."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

VENUES = {
    "AAAI": "Proceedings of the AAAI Conference on Artificial Intelligence",
    "ACM Multimedia": "Proceedings of the ACM International Conference on Multimedia",
    "AISTATS": "International Conference on Artificial Intelligence and Statistics",
    "CVPR": "Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition",
    "ICC": "IEEE International Conference on Communications",
    "ICCV": "Proceedings of the IEEE/CVF International Conference on Computer Vision",
    "ICLR": "International Conference on Learning Representations",
    "ICML": "International Conference on Machine Learning",
    "MLSys": "Proceedings of Machine Learning and Systems",
    "NeurIPS": "Advances in Neural Information Processing Systems",
}
"""Full names of venues."""
_PAPER = re.compile(r'([^":]+), "([^"]{10,})", ([^";]+?)(?:\.(?=\s|$)|;|$)')
_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
_VENUE = re.compile(r"(.+?),? (\d{4})(?: workshop ([^,;.]+))?")
_VOLUME = re.compile(r"(.+?) (\d+)(?:\((\d+)\))?")


@dataclass(frozen=True)
class Paper:
    """A paper: its authors' family names (the last may be `others`), title, venue (empty: arXiv alone) and year."""

    authors: tuple[str, ...]
    title: str
    venue: str
    year: int
    arxiv: str = ""
    workshop: str = ""

    def bibtex(self) -> str:
        """Its BibTeX entry, with family names only.

        >>> from fewbytes.experiments.papers import Paper
        >>> print(Paper(("Li", "Hu"), "Ditto: Fair and Robust Federated Learning", "ICML", 2021).bibtex())
        @inproceedings{li2021ditto,
          author = {Li and Hu},
          title = {{Ditto: Fair and Robust Federated Learning}},
          booktitle = {International Conference on Machine Learning},
          year = {2021},
        }
        """
        fields = {"author": " and ".join(f"{{{name}}}" if " " in name else name for name in self.authors)}
        fields["title"] = f"{{{self.title}}}"
        kind, volume = "misc", _VOLUME.fullmatch(self.venue)
        if volume is not None or "Transactions" in self.venue:
            kind, fields["journal"] = "article", self.venue if volume is None else volume[1]
            fields |= {"volume": volume[2]} if volume is not None else {}
            fields |= {"number": volume[3]} if volume is not None and volume[3] else {}
        elif self.venue:
            kind, name = "inproceedings", VENUES.get(self.venue, self.venue)
            fields["booktitle"] = f"{name}, workshop {self.workshop}" if self.workshop else name
        fields["year"] = str(self.year)
        if self.arxiv:
            fields |= {"eprint": self.arxiv, "archiveprefix": "arXiv"}
        lines = [f"  {key} = {{{value}}}," for key, value in fields.items()]
        return "\n".join([f"@{kind}{{{self.key},", *lines, "}"])

    @property
    def key(self) -> str:
        """The entry's key: first author, year, and first word of the title."""
        words = re.findall(r"\w+", self.title)
        first = next((word for word in words if len(word) > 3), words[0])
        return re.sub(r"[^a-z0-9]", "", _ascii(f"{self.authors[0]}{self.year}{first}").lower())


def papers_in(docstring: str) -> Iterator[Paper]:
    """The papers that a docstring states as `Authors, "Title", Venue Year` or `…, arXiv NUMBER, Year`, in order."""
    for paragraph in docstring.split("\n\n"):
        for authors, title, rest in _PAPER.findall(" ".join(paragraph.split())):
            arxiv, where = _ARXIV.search(rest), _VENUE.match(_ARXIV.sub("", rest).strip(" ,"))
            year = re.search(r"\b(?:19|20)\d\d\b", _ARXIV.sub("", rest))
            if year is None and arxiv is None:
                continue
            names = authors.strip().removesuffix(", et al.").split(", ")
            yield Paper(
                tuple([*names, "others"] if "et al." in authors else names),
                title,
                "" if where is None else where[1].strip(" ,"),
                int(year[0] if year is not None else f"20{arxiv[1][:2]}"),  # type: ignore[index]
                "" if arxiv is None else arxiv[1],
                "" if where is None else where[3] or "",
            )


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
