"""Results by site in sentences: whether federating helps, at which sites, and what each site contributes."""

from __future__ import annotations

from fewbytes.base.errors import listed
from fewbytes.report.evaluation import in_percent, main_metric
from fewbytes.report.records import Evaluation, Figure, Gain

WITH = {"shared": " with one shared model", "own": " with a model for each site"}


def verdicts(evaluation: Evaluation) -> list[str]:
    """Sentences on whether federating helps, by the sites' test sets: of the shared model and of sites' own models that
    gain most over training alone, and on the contribution of each site that was left out."""
    kinds = {each["name"]: each["kind"] for each in evaluation["models"]}
    means = [gain for gain in evaluation["gains"] if gain["site"] is None and gain["gain"]["value"] is not None]
    sentences = []
    gains = {kind: [g for g in means if kinds[g["models"]] == kind and kinds[g["over"]] == "alone"] for kind in WITH}
    for kind, of_kind in gains.items():
        if of_kind:
            best = max(of_kind, key=lambda gain: gain["gain"]["value"] or 0.0)
            sentences.append(_verdict(evaluation, best, len(of_kind), WITH[kind] if all(gains.values()) else ""))
    if not sentences and evaluation["runs"] and any(site["trained"] for site in evaluation["sites"]):
        sentences.append(
            "Whether federating helps is not known: no model here was trained alone (evaluate --alone trains them; a "
            "comparison needs the method separate)."
        )
    for gain in means:
        if kinds[gain["over"]] == "without":
            sentences.append(_contribution(evaluation, gain))
    return sentences + evaluation.get("unreported", [])


def _verdict(evaluation: Evaluation, gain: Gain, among: int, judged: str) -> str:
    kinds = {each["name"]: each["kind"] for each in evaluation["models"]}
    shared = kinds[gain["models"]] == "shared"
    whose, colon, _ = gain["models"].partition(": ")
    whose = f"{whose}'s" if colon else "the" if shared else "the sites'"
    model = f"{whose} {'shared model is' if shared else 'own models are'}"
    sites = [
        each for each in evaluation["gains"]
        if each["site"] is not None and (each["models"], each["over"]) == (gain["models"], gain["over"])
    ]  # fmt: skip
    without = [str(each["site"]) for each in sites if each["gain"]["value"] is None]
    sites = [each for each in sites if each["gain"]["value"] is not None]
    better = [str(each["site"]) for each in sites if _sign(each["gain"]) > 0]
    worse = [str(each["site"]) for each in sites if _sign(each["gain"]) < 0]
    head = {1: "Federating helps", -1: "Federating hurts", 0: "It is unclear whether federating helps"}
    most = f" (the best of {among} methods, which flatters it)" if among > 1 else ""
    at = [f"better at {listed(better)}"] if better else []
    at += [f"worse at {listed(worse)}"] if worse else []
    rest = len(sites) - len(better) - len(worse)
    at += [f"not distinguishable at {rest} of {len(sites)}"] if rest else []
    at += [f"no figure at {listed(without)}"] if without else []
    return (
        f"{head[_sign(gain['gain'])]}{judged}: by {main_metric(evaluation)}, {model} {_gap(evaluation, gain['gain'])} "
        f"{'better' if (gain['gain']['value'] or 0) >= 0 else 'worse'} than training alone on average over "
        f"{len(sites)} sites' test sets{most}; by site: {'; '.join(at)}."
    )


def _contribution(evaluation: Evaluation, mean: Gain) -> str:
    """What a site that was left out contributes: on average over sites, and at the site itself."""
    left = mean["over"].removeprefix("without ")
    own = [g for g in evaluation["gains"] if g["over"] == mean["over"] and g["site"] == left]
    sites = sum(g["over"] == mean["over"] for g in evaluation["gains"]) - 1
    places = [(mean, f"on average over {sites} sites"), *((gain, f"at {left} itself") for gain in own)]
    parts = [
        f"not different {where}"
        if not gain["gain"]["value"] and gain["gain"]["low"] == gain["gain"]["high"]
        else f"{_gap(evaluation, gain['gain'])} {'better' if (gain['gain']['value'] or 0.0) >= 0 else 'worse'} {where}"
        + ("" if _sign(gain["gain"]) else ", which may be chance")
        for gain, where in places
    ]
    return f"Contribution of {left}: with it, the shared model's {main_metric(evaluation)} is {'; '.join(parts)}."


def _sign(gain: Figure) -> int:
    """1 for a gain above chance, -1 for a loss, 0 if the interval includes 0 or is not known."""
    if gain["low"] is None or gain["high"] is None:
        return 0
    return 1 if gain["low"] > 0 else -1 if gain["high"] < 0 else 0


def _gap(evaluation: Evaluation, gain: Figure) -> str:
    """The size of a difference with its interval, in words: the ends keep their sign relative to it."""
    share, turn = in_percent(evaluation, main_metric(evaluation)), -1 if (gain["value"] or 0) < 0 else 1

    def number(value: float) -> str:
        return f"{100 * value:z.1f}" if share else f"{value:z.3g}"

    unit = " percentage points" if share else ""
    text = f"{number(turn * (gain['value'] or 0.0))}{unit}"
    if gain["low"] is None or gain["high"] is None:
        return text
    ends = sorted((turn * gain["low"], turn * gain["high"]))
    return f"{text} ({level(evaluation)} interval {number(ends[0])} to {number(ends[1])})"


def level(evaluation: Evaluation) -> str:
    """The level of the intervals, as text."""
    return f"{100 * evaluation['level']:g} %"
