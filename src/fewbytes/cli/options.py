"""Command-line options made from the declarations of settings (`fewbytes.base.settings`)."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

from fewbytes.base.settings import Group
from fewbytes.cli.brief import HelpAll


def options_of(group: type[Group]) -> list[inspect.Parameter]:
    """A group's settings as options, in a panel of their own."""
    parameters = []
    for key, each in group.declared().items():
        if (about := each.about).option is not None:
            names = [about.option] if about.option else []
            how = typer.Option(*names, help=about.help, metavar=about.metavar, rich_help_panel=group.title)
            text, default = each.text, None if isinstance(each.default, dict) else each.default
            if text is None:
                parameters.append(option(key, default, _plain(each.kind), how))
            else:
                parameters.append(option(key, None if default is None else text.write(default), str, how))
    return parameters


def option(name: str, default: Any, kind: Any, how: Any) -> inspect.Parameter:
    """One option; `how` is what typer.Option makes."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind | None, how]
    )


def _plain(kind: Any) -> Any:
    """The type the command line reads for a setting of this type: a number, a switch, several KEY=VALUE, or text."""
    while typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        plain = {_plain(each) for each in typing.get_args(kind) if each is not types.NoneType}
        return plain.pop() if len(plain) == 1 else str
    return list[str] if typing.get_origin(kind) is dict else kind if kind in (bool, int, float) else str


def option_words(text: str, groups: Iterable[type[Group]]) -> str:
    """An error's text with settings of these groups as options: `round_time` as `--round-time`, `clients=5` as
    `--clients 5`. Settings of one word without a value stay."""
    spelled = {
        key: (each.about.option or f"--{key.replace('_', '-')}").partition("/")[0]
        for group in groups
        for key, each in group.declared().items()
        if each.about.option is not None
    }
    bare = "|".join(key for key in spelled if "_" in key)
    beside, beyond = r"(?<![\w./'\"`=-])(?<!--set )", r"(?![\w./'\"`(-])"
    text = re.sub(rf"{beside}({'|'.join(spelled)})=(?=\S)", lambda found: f"{spelled[found[1]]} ", text)
    return re.sub(rf"{beside}({bare}){beyond}(?!=)", lambda found: spelled[found[1]], text)


def with_options(
    name: str, options: Sequence[inspect.Parameter], read: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options; its argument `name` is what `read` returns for the given ones."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        keyword = inspect.Parameter.KEYWORD_ONLY
        context = inspect.Parameter("context", keyword, annotation=typer.Context)
        own = [p.replace(kind=keyword) for p in signature.parameters.values() if p.name != name]

        @functools.wraps(function)
        def command(context: typer.Context, **values: Any) -> None:
            del values["help_all"]  # it has ended the command
            given = {o.name: values.pop(o.name) for o in options}
            sources = {key: context.get_parameter_source(key) for key in given}
            named = {key: given[key] for key, source in sources.items() if source and source.name == "COMMANDLINE"}
            function(**{name: read(named)}, **values)

        parameters = [
            context,
            *own,
            *options,
            inspect.Parameter("help_all", keyword, default=False, annotation=HelpAll),
        ]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate
