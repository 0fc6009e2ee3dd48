"""The group of all commands, in which ``train`` is the default."""

import difflib
from pathlib import Path

import click

import hvdtrain
from hvdtrain.errors import UsageError


class _TrainByDefault(click.Group):
    """A group in which the command ``train`` may be left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first not in self.commands and first not in ("--help", "--version"):
            if first and not first.startswith("-") and "." not in first and not Path(first).exists():
                close = difflib.get_close_matches(first, self.commands, n=1)
                hint = f"Did you mean {close[0]!r}? " if close else ""
                raise UsageError(
                    f"{first!r} is neither a command nor a config file",
                    f"{hint}Commands: {', '.join(self.commands)}. Options start with --.",
                )
            args = ["train", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Options of train, the default command"):
            rows = [row for option in self.commands["train"].params if (row := option.get_help_record(ctx))]
            formatter.write_dl(rows)


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
