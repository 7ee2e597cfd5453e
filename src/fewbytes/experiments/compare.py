"""Comparisons: several methods, or all, on the same clients, with one seed or several, tuned or not, in one folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import msgspec

from fewbytes.base.cores import available_cores
from fewbytes.base.errors import UserError, listed
from fewbytes.base.files import check_own, lock, locked, make_folder
from fewbytes.base.named import allowed_names, only_allowed
from fewbytes.experiments.display import Display, console, note
from fewbytes.experiments.evaluate import evaluate_here
from fewbytes.experiments.groups import Repeating
from fewbytes.experiments.jobs import Job, Outcome, work
from fewbytes.experiments.new_folders import new_folder
from fewbytes.experiments.run_folders import begun, finished
from fewbytes.experiments.study import ASKED, Chosen, Study, begin_study, check_same, choose, read_study
from fewbytes.experiments.terms import Bench, bench_of, per_method
from fewbytes.experiments.tuning import (
    RULE,
    VALIDATION,
    Tried,
    Validated,
    chosen_of,
    grid,
    in_words,
    read_space,
    signed,
    suggested,
    validated,
)
from fewbytes.report import RunFolder, choices, read_runs, write_report
from fewbytes.running.recorders import watcher_of
from fewbytes.running.watcher import Watcher

TUNING = "tuning"  # the folder of runs that tune, in the comparison's
LOCKS = "locks"
ONE_SEED = "--seeds {seed} is one run, with the seed {seed}; for three: --seeds 1,2,3"


def compare(
    names: list[str] | None,
    settings: dict[str, Any],
    out: Path,
    resume: Path | None = None,
    watch: Sequence[str] = (),
    how: Repeating | None = None,
) -> tuple[Path, list[dict[str, Any]]]:
    """Run some methods with their own defaults, or ["all"] on equal terms, into a new folder below `out`.

    Returns the folder, and each run's result.json. A method that cannot run on the task, or fails, is reported and
    the others still run. `resume`: the comparison's folder; it is made if it is missing, and several processes may work
    in it. `names`: None for what that folder states. `watch`: arguments of `watcher_of`; each run is logged as one of
    its own. `how`: seeds, tuning, and how runs are shared. Raises UserError for anything wrong in what is asked for,
    and for a folder of another comparison.
    """
    for text in watch:
        watcher_of(text, "")  # refused before anything is written
    how = how or Repeating()
    study = _study(names, settings, resume, how)
    comparison = _Comparison(study, how, watch)
    folder, new = resume or new_folder(out, "compare"), resume is None or not resume.exists()
    comparison.chosen = begin_study(folder, study).chosen
    for other in map(Path, how.merge or ()):
        comparison.merge(folder, other)
    try:
        comparison.run(folder)
    except KeyboardInterrupt:
        if any(finished(folder / job.place) for job in comparison.finals()):
            comparison.report(folder)
        raise
    if new and not any(folder.rglob("config.toml")) and (failed := [o for o in comparison.outcomes.values() if o.why]):
        shutil.rmtree(folder)
        raise UserError(f"no method can run here; {comparison.finals()[0].method}: {failed[0].why}")
    return folder, comparison.results(folder)


def _study(names: list[str] | None, settings: dict[str, Any], resume: Path | None, how: Repeating) -> Study:
    """What is asked for: by the arguments, else by the folder to resume or the first to merge. Raises UserError."""
    if names is None:
        merged = [Path(folder) for folder in how.merge or ()]
        return read_study(resume if resume is not None and (resume.exists() or not merged) else merged[0])
    if how.seeds is not None and "seed" in settings:
        raise UserError("seed and seeds are both given: leave one out")
    if how.seeds is not None and len(set(how.seeds)) < len(how.seeds):
        raise UserError(f"a seed is given twice: {','.join(map(str, how.seeds))}")
    if how.trials is not None and not how.tune:
        raise UserError("trials is the number of settings to try: name parameters (--tune lr=0.001..0.3)")
    if twice := how.tune.keys() & settings.get("parameters", {}).keys():
        raise UserError(f"{min(twice)} is both set and tuned: leave out --set or --tune")
    if how.tune and not settings.get("validation"):
        settings = settings | {"validation": VALIDATION}
    study = Study(names, settings, list(how.seeds or ()), how.tune, how.trials)
    if resume is not None and (resume / ASKED).exists():
        check_same(resume, read_study(resume), study)
    return study


class _Comparison:
    """The runs of a comparison, and those of them that this process is to do. `chosen`: parameters by method."""

    def __init__(self, study: Study, how: Repeating, watch: Sequence[str]) -> None:
        self.study, self.how, self.watch = study, how, watch
        self.chosen, self.untuned = dict[str, Chosen](), dict[str, Outcome]()
        self.outcomes: dict[str, Outcome] = {}  # by place
        self.seeds: list[int | None] = [*study.seeds] or [None]
        self.bench = _bench(study.asked(), self.seeds[0], tell=True)
        tuned = per_method(list(self.bench.named.values()), study.tune, "--tune")
        self.spaces = {name: read_space(given, tuned[given], study.trials) for name, given in self.bench.named.items()}
        if study.tune:
            seed = "the run's seed" if self.seeds[0] is None else f"seed {self.seeds[0]}"
            note(RULE.format(share=float(study.settings["validation"]), seed=seed))
        if len(study.seeds) == 1:
            note(ONE_SEED.format(seed=study.seeds[0]))
        for text in self.bench.first.notes if study.tune or study.seeds else ():
            note(text)

    def finals(self, method: str | None = None) -> list[Job]:
        """The compared runs of all methods, or of one: with every seed, and the chosen parameters."""
        jobs = []
        for name in self.bench.settings if method is None else [method]:
            parameters = self.chosen[name].parameters if name in self.chosen else {}
            for number, seed in enumerate(self.seeds):
                like = _trial_place(name, parameters) if parameters and not number else ""
                place = f"{name}-seed-{seed}" if len(self.seeds) > 1 else name
                jobs.append(Job(name, seed, parameters, place, like))
        return jobs

    def run(self, folder: Path) -> None:
        """Do this process's runs."""
        asked, jobs = self.study.asked(), self.how.jobs
        here = _How(asked, folder, tuple(self.watch))
        there = _How(asked, folder, allowed=allowed_names(), workers=max(1, available_cores() // jobs), quiet=True)
        chains = [self._chain(name, folder) for name in self.bench.settings]
        try:
            work(chains, self._total(), partial(_do, here), (partial(_do, there), jobs), self.outcomes)
        except KeyboardInterrupt:
            if jobs > 1:
                command = self.bench.first.experiment.resuming("compare")
                console.print(
                    f"interrupted; resume with: fewbytes {command} --resume {quote(str(folder))}", soft_wrap=True
                )
            raise

    def _mine(self, name: str, seed: int = 0) -> bool:
        """Whether the run of a method with the seed of this index is in this process's shard. A shard has a method's
        runs with all seeds if they are tuned."""
        unit = list(self.bench.settings).index(name)
        unit += 0 if self.study.tune else seed * len(self.bench.settings)
        return self.how.shard is None or self.how.shard.has(unit)

    def _total(self) -> int:
        """How many runs this process has to do or to check."""
        total = sum(self._mine(name, seed) for name in self.bench.settings for seed in range(len(self.seeds)))
        for name, space in self.spaces.items():
            if space and name not in self.chosen and self._mine(name):
                total += self.study.trials or len(grid(space))
        return total

    def _chain(self, name: str, folder: Path) -> Iterator[list[Job]]:
        """A method's runs: those by which its parameters are chosen, then those with all seeds."""
        if isinstance(self.bench.settings[name], str):
            yield [job for job in self.finals(name)[:1] if self._mine(name)]  # which states the reason
            return
        if self.spaces[name] and name not in self.chosen:
            if not self._mine(name):
                return
            tried = yield from self._trials(name, folder)
            chosen = chosen_of(name, self.spaces[name], tried)
            if chosen is None:
                failed = [self.outcomes[_trial_place(name, each.parameters)] for each in tried]
                outcome = next((each for each in failed if each.why), Outcome("left out", "it is not validated"))
                self.untuned[name] = Outcome(outcome.status, f"no setting of it has a validation score ({outcome.why})")
                note(f"{name} is left out: {self.untuned[name].why}")
                return
            self.chosen[name] = choose(folder, name, chosen)
            note(self.chosen[name].why)
        yield [job for seed, job in enumerate(self.finals(name)) if self._mine(name, seed)]

    def _trials(self, name: str, folder: Path) -> Generator[list[Job], None, list[Tried]]:
        """The runs that tune a method; returns what was tried."""
        if self.study.trials is None:
            settings = grid(self.spaces[name])
            yield [self._trial(name, parameters) for parameters in settings]
            return [Tried(each, _score(folder / _trial_place(name, each))) for each in settings]
        tried = list[Tried]()
        asking = suggested(self.spaces[name], self.study.trials, self.bench.first.experiment.model.seed)
        parameters: dict[str, Any] | None = next(asking)
        while parameters is not None:
            yield [self._trial(name, parameters)]
            tried.append(Tried(parameters, _score(folder / _trial_place(name, parameters))))
            parameters = _after(asking, tried[-1].score)
        return tried

    def _trial(self, name: str, parameters: dict[str, Any]) -> Job:
        return Job(name, self.seeds[0], parameters, _trial_place(name, parameters), trial=True)

    def merge(self, folder: Path, other: Path) -> None:
        """Copy the finished runs and the choices of another folder of this comparison. Raises UserError if it is
        another comparison, or has chosen other parameters."""
        check_own(other)
        there = read_study(other)
        check_same(other, there, self.study)
        for name, chosen in there.chosen.items():
            self.chosen[name] = choose(folder, name, chosen)
            if self.chosen[name].parameters != chosen.parameters:
                raise UserError(
                    f"{other} and {folder} have different parameters of {name} ({in_words(chosen.parameters)}, "
                    f"{in_words(self.chosen[name].parameters)}): merge only shards that share no method"
                )
        tuning = (f"{TUNING}/{path.name}" for path in sorted((other / TUNING).glob("*")))
        for place in [*tuning, *(job.place for job in self.finals())]:
            if not finished(folder / place) and finished(other / place):
                _copy(other / place, folder / place)

    def report(self, folder: Path) -> list[RunFolder]:
        """Write the report of the runs that have begun and that no other process is doing; returns them."""
        with locked(folder / "lock"):
            places = [job.place for job in self.finals() if finished(folder / job.place) or _is_free(folder, job.place)]
            runs = read_runs(sorted(folder / place for place in places if (folder / place / "rounds.jsonl").is_file()))
            if runs:
                write_report(runs, folder / "report.html")
        return runs

    def results(self, folder: Path) -> list[dict[str, Any]]:
        """Evaluate models by site, write the report, and return each run's result.json, or why there is none."""
        finals = self.finals()
        ended = [job for job in finals if finished(folder / job.place)]
        if ended and len(self.seeds) == 1 and self.how.shard is None:
            evaluate_here(folder, self.bench.prepared(ended[0].method, {}).found, note)
        recommended = choices(self.report(folder))
        if len(ended) == len(finals):
            shutil.rmtree(folder / LOCKS, ignore_errors=True)
        elif elsewhere := [str(job) for job in finals if job not in ended and self._why_not(job) is None]:
            left = listed(elsewhere, 3)
            note(f"{len(ended)} of {len(finals)} runs are done; left to other shards or processes: {left}")
        results = []
        for job in finals:
            if job in ended:
                result = json.loads((folder / job.place / "result.json").read_text())
            elif (outcome := self._why_not(job)) is not None:
                result = {"method": job.method, "status": outcome.status, "why": outcome.why}
                result |= {} if job.seed is None else {"seed": job.seed}
            else:
                continue
            advice = {each.kind: str(each) for each in recommended if each.label == result["method"]}
            results.append(result | {"recommended": advice})
        return results

    def _why_not(self, job: Job) -> Outcome | None:
        """Why a run is not done; None: it is another process's. A method that cannot run has one outcome for all."""
        refused = isinstance(self.bench.settings[job.method], str)
        place = self.finals(job.method)[0].place if refused else job.place
        outcome = self.untuned.get(job.method) or self.outcomes.get(place)
        return None if outcome is None or outcome.status == "taken" else outcome


def _trial_place(name: str, parameters: dict[str, Any]) -> str:
    values = re.sub(r"[^\w.,=+-]", "_", ",".join(f"{key}={value}" for key, value in parameters.items()))
    return f"{TUNING}/{name}-{values}"


def _score(folder: Path) -> Validated | None:
    return validated(folder) if finished(folder) else None


def _after(asking: Generator[dict[str, Any], float | None, None], score: Validated | None) -> dict[str, Any] | None:
    """The next settings to try, after a score; None: no more."""
    try:
        return asking.send(None if score is None else signed(score))
    except StopIteration:
        return None


# ---- one run, in this process or another ----


class _How(NamedTuple):
    """What is common to all runs that a process does: the comparison as JSON and its folder, watchers, the names that
    files may import (None: any), the number of workers, and whether nothing is printed."""

    asked: bytes
    folder: Path
    watch: tuple[str, ...] = ()
    allowed: tuple[str, ...] | None = None
    workers: int | None = None
    quiet: bool = False


class _Notes(Watcher):
    """Collects the notes of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        """Collect one."""
        self.texts.append(text)


def _do(how: _How, job: Job, position: str) -> Outcome:
    """Do a run, or resume it, unless another process has it."""
    run, notes = how.folder / job.place, _Notes()
    with nullcontext() if how.allowed is None else only_allowed(*how.allowed):
        try:
            with _claim(how.folder, job.place) as mine:
                if not mine:
                    return Outcome("taken")
                if not finished(run):
                    _run(how, job, position, notes)
        except OSError:
            raise
        except Exception as error:
            status = "failed" if (run / "config.toml").exists() else "left out"
            return Outcome(status, str(error) or type(error).__name__, notes.texts)
    return Outcome("done", notes=notes.texts)


def _run(how: _How, job: Job, position: str, notes: _Notes) -> None:
    run = how.folder / job.place
    prepared = _bench(how.asked, job.seed).prepared(job.method, job.parameters, how.workers)
    resume = begun(run)
    if job.like and not resume and finished(how.folder / job.like):
        _copy(how.folder / job.like, run)
        return
    watchers = [watcher_of(text, f"{how.folder.absolute().name}/{job.place}") for text in how.watch]
    headline, command = prepared.method.promises.headline, prepared.experiment.resuming("compare")
    display = Display(str(job), how.folder, command, headline, position)
    prepared.execute(run, resume, page=False, display=display, watchers=[*watchers, *([notes] if how.quiet else [])])


@lru_cache(maxsize=1)  # the data of one seed at a time
def _bench(asked: bytes, seed: int | None, tell: bool = False) -> Bench:
    """The methods with a seed. `tell`: also print their terms."""
    study = msgspec.json.decode(asked, type=Study)
    settings = study.settings if seed is None else study.settings | {"seed": seed}
    tuned = {key.rpartition(".")[2] for key in study.tune}
    bench = bench_of(study.methods, settings, tuned, note if tell else lambda text: None)
    return bench if not study.seeds and not study.tune else replace(bench, leader="")


@contextmanager
def _claim(folder: Path, place: str) -> Iterator[bool]:
    """Whether this process, and no other, has a run of the comparison inside the block."""
    make_folder(folder / LOCKS)
    handle = lock(folder / LOCKS / place.replace("/", "+"))
    with nullcontext() if handle is None else handle:
        yield handle is not None


def _is_free(folder: Path, place: str) -> bool:
    """Whether no other process does a run."""
    with _claim(folder, place) as free:
        return free


def _copy(run: Path, to: Path) -> None:
    """Copy a finished run; the copy is whole or missing."""
    part = to.with_name(f"{to.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(run, part)
    shutil.rmtree(to, ignore_errors=True)
    part.rename(to)
