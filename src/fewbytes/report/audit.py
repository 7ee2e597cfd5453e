"""The page for an ethics board or a data-protection officer: what left a site, or the clients of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fewbytes.base.chain import Fault, fingerprints, verify
from fewbytes.base.errors import UserError, listed, visible
from fewbytes.base.files import replacing
from fewbytes.base.units import listed as listed_numbers
from fewbytes.methods import method_class, short_name
from fewbytes.report.document import plain_document
from fewbytes.report.folder import RunFolder
from fewbytes.wire.schema import schema_of

PAGE, STATEMENT = "audit.html", "statement.html"
_LEAKS = Path(__file__).parent / "assets" / "leaks.json"
STEPS = {":data": "before the run", ":score": "scoring"}
"""The engine's own handlers, in words."""
Line = dict[str, Any]
"""A line of egress.jsonl, decoded."""
_NAMES, _SHOWN = 12, 200  # maximum: names of entries, rows
_NOT_IN_RECORD = (
    "That a node is connected, its number, and when it answers: the server and the network see that.",
    "Reasons for declining a request, and errors of a set-up. Neither contains data.",
    "Anything that leaves the site's machines by other programs.",
    "What the owner of the machine hides: with the key and the disk, anyone can write another record. A copy of "
    "egress.head with the auditor, from an earlier day, shows that.",
)
_NOT_IN_RUN = (
    "Which of the clients' samples influenced a model, and how. The table above states what attacks find.",
    "Copies of the run folder that others have: it has all clients' states and scores.",
)


@dataclass(frozen=True)
class Exchange:
    """A row: what one handler sent in one run."""

    run: str
    handler: str
    contents: str
    rounds: str
    answers: int
    bytes: int


@dataclass(frozen=True)
class Audited:
    """What a page says about a site: whether its record is `sound`, a sentence about that, and the `evidence`; the
    `exchanges`; sentences `about` them; the policy's `rules` now, and their `changes`."""

    name: str
    sound: bool
    verdict: str
    evidence: list[str]
    exchanges: list[Exchange]
    methods: list[str]
    hidden: bool
    about: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    no_rules: str = "The site has set no rules: everything that a server asks for is answered."

    @property
    def shown(self) -> list[Exchange]:
        """The rows that the page shows: the last ones."""
        return self.exchanges[-_SHOWN:]

    @property
    def answers(self) -> int:
        """The number of answers."""
        return sum(each.answers for each in self.exchanges)

    @property
    def bytes(self) -> int:
        """The bytes of all answers."""
        return sum(each.bytes for each in self.exchanges)


def records_in(folder: Path) -> list[Path]:
    """The folders of nodes' records of what left, in a folder or under it. Raises UserError if there is none."""
    found = sorted({path.parent for path in folder.rglob("egress.jsonl") if path.is_file()})
    if not found:
        raise UserError(f"{folder} has no egress.jsonl, in which a node records what leaves: name the node's folder")
    return found


def _called(folder: Path) -> str:
    """A record's title: by the client that the node holds or, of a member, which the server numbers, by the folder with
    its node.toml."""
    if folder.parent.name != ".egress":
        return folder.name
    if folder.name != "node":
        return f"Node {folder.name}"
    own = folder.parents[2]
    return f"Node {own.name}" if (own / "node.toml").is_file() else f"Node in {folder.parents[1]}"


def audited(folder: Path, key: Path | None = None) -> Audited:
    """A node's record, verified. `key`: as in `fewbytes.base.chain.verify`. Raises UserError if it cannot be read."""
    lines, fault = verify(folder, key)
    try:
        return _audited(folder, lines, fault, fingerprints(key or folder / "key.pub"))
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / 'egress.jsonl'} is signed, but no node of this version wrote it") from None


def _audited(folder: Path, lines: Sequence[Line], fault: Fault | None, keys: Sequence[str]) -> Audited:
    answers = [line for line in lines if "rules" not in line]
    if fault is None:
        verdict = f"The record is whole: its {len(lines):,} lines are in order, unchanged, and signed by the node."
    else:
        verdict = f"The record was changed, at {fault}. Only the {len(lines):,} lines before that are shown."
    times = [line["time"] for line in lines]
    evidence = [f"From {times[0]} to {times[-1]}."] if times else []
    evidence.append(
        f"Fingerprint of the key: {'; '.join(keys)}. Compare it with the one that is registered at the server "
        "(ssh-keygen -lf NAME.pub)."
    )
    if lines:
        evidence.append(f"The last line is number {len(lines)}. The file egress.head has its hash: keep a copy.")
    rules = [line for line in lines if "rules" in line]
    spent = [line["epsilon"] for line in answers if "epsilon" in line]
    about = []
    if spent:
        about.append(f"All runs together have spent epsilon {max(spent):.3g} of the training samples' privacy.")
    replies = [line for line in answers if line["replies"]]
    return Audited(
        _called(folder.resolve()),
        fault is None,
        verdict,
        evidence,
        _exchanges(answers),
        sorted({name for line in replies for name in line["methods"]}),
        bool(replies) and all(line["hidden"] for line in replies),
        about,
        list(rules[-1]["rules"]) if rules else [],
        [f"These rules hold since {rules[-1]['time']}; before, there were {len(rules) - 1} other versions."]
        if len(rules) > 1
        else [],
    )


def _exchanges(answers: Iterable[Line]) -> list[Exchange]:
    """The rows of a record, by run and handler."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in answers:
        groups.setdefault((line["run"], line["handler"]), []).append(line)
    return [
        Exchange(
            run,
            STEPS.get(handler, handler),
            _contents(group),
            listed_numbers({line["round"] for line in group} - {0}) or "—",
            len(group),
            sum(line["bytes"] for line in group),
        )
        for (run, handler), group in groups.items()
    ]


def _contents(group: Sequence[Line]) -> str:
    """The names of what one handler's answers had."""
    fields: dict[str, list[str]] = {}
    beside: dict[str, None] = {}
    for line in group:
        for name, entries in line["fields"].items():
            known = fields.setdefault(name, [])
            known += [each for each in entries if each not in known]
        beside |= dict.fromkeys(line["beside"])
    parts = [f"{name} ({listed(entries, _NAMES)})" if entries else name for name, entries in fields.items()]
    return "; ".join([*parts, *(["beside: " + ", ".join(beside)] if beside else [])]) or "only that it is done"


def stated(run: RunFolder) -> Audited:
    """What the clients of a run in one folder sent. Raises UserError for a run without a ledger."""
    if run.ledger is None:
        raise UserError(f"{run.path} has no ledger.parquet, in which a run records what is sent: let the run end first")
    name = str(run.fact("method"))
    kind = method_class(name)
    replies = {each.name: each.reply for each in _handlers(kind)}
    groups: dict[str, list[tuple[int, int]]] = {}
    for row in run.ledger.select(["round", "handler", "bytes_up"]).to_pylist():
        if row["bytes_up"]:
            groups.setdefault(row["handler"], []).append((row["round"], row["bytes_up"]))
    rows = [
        Exchange(
            run.path.resolve().name,
            handler,
            ", ".join(each.name for each in schema_of(replies[handler]).fields) if replies.get(handler) else "a reply",
            listed_numbers({t for t, _ in group} - {0}) or "—",
            len(group),
            sum(nbytes for _, nbytes in group),
        )
        for handler, group in groups.items()
    ]
    hidden = bool(run.fact("secure_aggregation"))
    spent = (run.result or {}).get("epsilon_spent")
    about = [f"A client sends {kind.promises.sends} in a round."] if kind.promises.sends else []
    about += [] if spent is None else [f"The run has spent epsilon {spent:.3g} (dp = {run.fact('dp')!r})."]
    return Audited(
        "",
        True,
        "A run of one folder: this page is computed from its ledger, which is not signed.",
        [],
        rows,
        [short_name(name)],
        hidden,
        about,
        no_rules="Rules apply only to a site with its own node (fewbytes deploy). In one process there are none.",
    )


def _handlers(kind: Any) -> list[Any]:
    from fewbytes.core.method import handlers_of

    return handlers_of(kind)


def write_audit(sites: Sequence[Audited], path: Path, title: str) -> Path:
    """Write the page about these sites, and return its path."""
    figures = json.loads(_LEAKS.read_text("utf-8"))
    unknown = {"images": "not measured", "members": "not measured"}
    methods = sorted({name for site in sites for name in site.methods} - {"secureaggregation"})
    text = plain_document(
        "audit.html",
        title=title,
        facts=[time.strftime("written %Y-%m-%d %H:%M UTC", time.gmtime()), f"{sum(s.bytes for s in sites):,} bytes"],
        sites=sites,
        leaks=[{"method": name, **figures.get(name, unknown)} for name in methods],
        protections=_protections(sites),
        limits=_NOT_IN_RUN if sites and not sites[0].name else _NOT_IN_RECORD,
    )
    with replacing(path) as file:
        file.write(visible(text).encode(errors="replace"))
    return path


def _protections(sites: Sequence[Audited]) -> list[str]:
    """What bounds or hides replies beyond the measured figures."""
    found = []
    if sites and all(site.hidden for site in sites):
        found.append(
            "All replies were under secure aggregation: the server saw their sum, not any of them, so that a "
            "reconstruction must work on the sum."
        )
    if any("epsilon" in sentence for site in sites for sentence in site.about):
        found.append("Differential privacy bounds what any attack can find, by the epsilon that is stated above.")
    return found
