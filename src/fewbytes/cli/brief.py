"""Short help: the options that a first user needs, a line each, by purpose. `--help-all` shows all options."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer
from click import Argument, Context, HelpFormatter, Option
from typer.core import TyperCommand

DATA = {
    "dataset": "digits, a folder or table, or module:function",
    "target": "tables: the column to predict",
    "clients": "number of clients",
    "partition": "iid, pathological, local (each has its own) …",
    "alpha": "dirichlet: the smaller, the more clients differ",
}
TRAINING = {
    "model": "mlp, resnet8, torchvision:NAME, hf:NAME, module:function",
    "rounds": "number of rounds",
    "parameters": "a parameter of the method, as in: --set epochs=2 --set lr=0.1",
}
MORE = {
    "metrics": "what to score by, comma-separated, e.g. auc,f1",
    "seed": "same seed, same results, bit for bit",
    "device": "cpu or cuda",
}
BYTES = {"bits": "round all messages to this many bits per value, e.g. 0.5"}
FILES = {
    "config": "a TOML file with any of the settings",
    "out": "the folder for run folders",
    "resume": "resume the run in this folder",
    "as_json": "print the result as JSON",
}
PLACES = {
    "hosts": "the sites' hosts, comma-separated (default: this machine)",
    "address": "host:port where the sites reach this machine",
    "federation": "a federation's folder, in place of --hosts and --address",
}
METHOD = {"method": "a name from `fewbytes methods`, or module:Class"}
ONE_RUN = {"Data": DATA, "Model and training": TRAINING | MORE, "Bytes": BYTES, "Files": FILES}
FIRST = {
    "run": {"Method": METHOD, **ONE_RUN},
    "compare": {"Methods": {"methods": "names, or all (default: fedavg fedpurin separate)"}, **ONE_RUN},
    "plan": {
        "Method": METHOD,
        "Link": {"uplink": "upload speed of a client", "downlink": "download speed (default: the same)"},
        **ONE_RUN,
        "Model and training": TRAINING,
        "Files": {name: FILES[name] for name in ("config", "as_json")},
    },
    "deploy": {
        "Method": METHOD,
        "Sites": PLACES
        | {"min_replies": "fraction of sites that must answer", "round_timeout": "seconds to wait for them in a round"},
        "Data": {name: DATA[name] for name in ("dataset", "target")}
        | {"client_data": "with --partition local: each site's own data"},
        "Model and training": TRAINING,
        "Bytes": BYTES,
        "Files": FILES,
    },
    "survey": {
        "Sites": PLACES,
        "Data": DATA,
        "Answers": {
            "tell": "what a site reports: figures, labels, sizes, nothing",
            "min_count": "show no figure of fewer samples",
            "duplicates": "look for near-duplicates between sites",
        },
        "Files": {name: FILES[name] for name in ("config", "out", "as_json")},
    },
    "partition": {
        "Data": DATA | {"validation": "fraction of training samples held out", "seed": "another seed, another split"},
        "Figure": {"figure": "draw it, clients by classes: a .svg or .png file"},
        "Files": {name: FILES[name] for name in ("config", "as_json")},
    },
    "evaluate": {
        "Models": {"runs": "run folders, a folder of them, or a .safetensors file"},
        "Compare with": {
            "alone": "training at every site alone",
            "pooled": "training on all sites' data together",
            "without": "training without this site; repeatable",
        },
        "Data": {
            "sites": "sites that never trained: a folder with a folder or table each",
            "by": "tables: a column of subgroups, as in: --by age=50,70",
            "metrics": MORE["metrics"],
        },
        "Sites": {name: PLACES[name] for name in ("hosts", "address", "federation")},
        "Files": {"out": "output folder (default: the run's)", "as_json": FILES["as_json"]},
    },
}
"""By command and purpose, the options of the short help and a line on each."""
ALL = "fewbytes.help"  # key in a context's meta


def _show_all(context: Context, _: Any, given: bool) -> None:
    if given:
        context.meta[ALL] = True
        print(context.get_help(), end="")
        context.exit()


HelpAll = Annotated[bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options.")]


class Brief(TyperCommand):
    """A command whose `--help` is short."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        """The short help, or with `--help-all` all of it."""
        if ctx.meta.get(ALL):
            super().format_help(ctx, formatter)
        else:
            formatter.write("\n".join(self._page(ctx)) + "\n")

    def _page(self, ctx: Context) -> list[str]:
        head, *rest = (self.help or "").split("\n\n")
        parameters = {each.name: each for each in self.params}
        names = {
            name: each.opts[-1] if isinstance(each, Option) else each.make_metavar(ctx).strip("[].")
            for name, each in parameters.items()
        }
        argument = [each.make_metavar(ctx) for each in self.params if isinstance(each, Argument)]
        lines = [" ".join([f"Usage: fewbytes {self.name}", *argument, "[OPTIONS]"]), ""]
        lines += [*textwrap.wrap(head, 80), ""]
        lines += textwrap.wrap(rest[-1].replace("`", ""), 80, subsequent_indent="    ", break_on_hyphens=False)
        for title, texts in FIRST[self.name or ""].items():
            lines += ["", f"{title}:"]
            for name, text in texts.items():
                default = parameters[name].default
                shown = "" if default is None or isinstance(default, bool | list) else f" [{default}]"
                lines.append(f"  {names[name]:<15} {text}{shown}")
        count = sum(isinstance(each, Option) for each in self.params)
        return [*lines, "", f"All {count} options, with their defaults: fewbytes {self.name} --help-all"]
