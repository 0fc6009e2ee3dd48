"""Options that are config fields, and the layers of a configuration that they make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

import hvdtrain
from hvdtrain.config import Config, Layer, is_nullable
from hvdtrain.config.layers import parse_assignments, read_file
from hvdtrain.config.options import GROUPS, NULL, FieldChoice, OrNull
from hvdtrain.errors import UsageError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.schedule import Cadence
from hvdtrain.storage.text import did_you_mean


class _TrainByDefault(click.Group):
    """A group in which the command ``train`` may be left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first not in self.commands and first not in ("--help", "--version"):
            if first and not first.startswith("-") and "." not in first and not Path(first).exists():
                hint = f"{did_you_mean(first, self.commands)} Commands: {', '.join(self.commands)}."
                remedy = f"{hint.lstrip()} Options start with --."
                raise UsageError(f"{first!r} is neither a command nor a config file", remedy)
            args = ["train", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        train = self.commands["train"]
        train.format_options(click.Context(train, parent=ctx), formatter)


@click.group(
    cls=_TrainByDefault, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(hvdtrain.__version__, prog_name="hvdtrain")
def cli() -> None:
    """Train PyTorch and TensorFlow (Keras 3) models on any number of hosts, over Horovod.

    \b
    horovodrun -np 4 python -m hvdtrain [CONFIG.yaml] --framework torch|tf [OPTIONS]
    horovodrun -np 16 -H host1:8,host2:8 python -m hvdtrain --framework torch

    Without a launcher, a single worker trains. Options take precedence over --set, --set over
    CONFIG.yaml, and CONFIG.yaml over the task's defaults.
    """  # noqa: D301 - click reads a backspace as the start of lines that it must not wrap


# config fields that have their own option; --set sets any field
OPTIONS = tuple(name for names in GROUPS.values() for name in names)

# what is given once for each part of a field
_PART_METAVARS = {"track": "NAME"}


def config_options(*names: str, defaults: bool = True) -> Callable[[Any], Any]:
    """Return a decorator that adds the options of these config fields, and --set and --debug."""

    def decorate(command: Any) -> Any:
        command = click.option("--debug", is_flag=True, help="Show the traceback of errors.")(command)
        command = click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set any config field (YAML value).",
        )(command)
        for name in reversed(names):
            command = _config_option(name, defaults)(command)
        return command

    return decorate


def _config_option(name: str, show_default: bool) -> Callable[[Any], Any]:
    field = Config.model_fields[name]
    has_default = show_default and field.default not in (None, ()) and not field.is_required()
    default = f" [{field.default}]" if has_default else ""
    kind, metavar = _option_type(name, field.annotation)
    extra: Any = {"is_flag": False, "flag_value": "auto"} if name == "resume" else {}
    flag, help_text = f"--{name.replace('_', '-')}", f"{field.description}{default}"
    if get_origin(field.annotation) is tuple:  # given once for each part
        return click.option(
            flag, name, multiple=True, metavar=_PART_METAVARS.get(name, "PATTERN"), help=help_text
        )
    if field.annotation is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=field.description)
    return click.option(flag, name, type=kind, metavar=metavar, help=help_text, **extra)


def _option_type(name: str, annotation: Any) -> tuple[Any, str | None]:
    """Return the click type and metavar of a config field; the config checks ranges."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    if name == "framework":
        return FieldChoice(list(FRAMEWORKS)), None
    if get_origin(annotation) is Literal:
        return FieldChoice(get_args(annotation)), None
    kind: Any = {int: click.INT, float: click.FLOAT}.get(kinds[0], click.STRING)
    metavar = {"resume": "[auto|PATH]", "profile": "FIRST-LAST", "max_time": "TIME"}.get(name)
    if Cadence in kinds or annotation is Cadence or name.endswith("_every"):
        kind, metavar = click.STRING, "STEPS|Nepoch"
    return (OrNull(kind) if is_nullable(name) else kind), metavar


def given_layers(
    assignments: tuple[str, ...], options: dict[str, Any], config_file: Path | None = None
) -> list[Layer]:
    """Return the layers of a configuration that a command line gives, the weakest first."""
    given = {
        name: None if value is NULL else value for name, value in options.items() if value not in (None, ())
    }
    file = [read_file(config_file)] if config_file else []
    return [*file, parse_assignments(assignments), Layer("options", given)]
