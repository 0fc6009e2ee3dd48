"""Types of options and commands: what the command line adds to click, mostly hints."""

import faulthandler
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from hvdtrain.config import Config
from hvdtrain.config.field_names import advice_for, meant_field, value_hint
from hvdtrain.host.launcher import launched_rank
from hvdtrain.host.output import make_output_tolerant
from hvdtrain.host.start_reports import report_begin
from hvdtrain.storage.files import check_url, expand_path
from hvdtrain.storage.text import did_you_mean
from hvdtrain.storage.urls import is_url, shown

# the options of train, as its help shows them
GROUPS = {
    "Task and data": ("framework", "task", "on_changed_data", "read_workers", "on_bad_sample",
                      "mixup", "cutmix", "seed"),
    "Length": ("epochs", "steps", "max_time", "early_stopping"),
    "Batch": ("batch_size", "global_batch_size", "accumulate"),
    "Learning rate and optimizer": ("learning_rate", "lr_scaling", "base_batch_size", "lr_schedule",
                                    "warmup_epochs", "warmup_steps", "optimizer", "weight_decay", "momentum",
                                    "clip_norm", "label_smoothing", "ema_decay"),
    "Workers": ("compression", "overlap", "shard", "stages", "sync_every", "outer_optimizer",
                "outer_learning_rate", "outer_momentum", "sync_batch_norm", "stall_timeout"),
    "Device and precision": ("device", "precision", "checkpoint_activations", "compile", "profile"),
    "Saving and resuming": ("run_dir", "resume", "init", "init_only", "init_skip", "save_every", "keep_last",
                            "keep_best", "on_save_error"),
    "Evaluation and logging": ("eval_every", "log_every", "track", "track_checkpoints"),
}  # fmt: skip
_LAST = ("assignments", "debug", "help")  # of the options that a command shows first
NULL = object()  # what an option given as null has; one that is not given has None


class JobCommand(click.Command):
    """A command whose options are config fields: it says which field an unknown option may stand for."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with suppress(OSError, ValueError):  # without a standard error
            faulthandler.enable()
        make_output_tolerant()
        report_begin(launched_rank())
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, and those of train by what they are for, or where they are."""
        all_of_train = ""
        options = (one for one in self.get_params(ctx) if isinstance(one, click.Option))
        records = {one.name: one.get_help_record(ctx) for one in options}
        records |= {name: records.pop(name) for name in _LAST if name in records}
        groups = {title: [records.pop(name, None) for name in names] for title, names in GROUPS.items()}
        if self.name != "train" and all(map(all, groups.values())):
            groups, all_of_train = {}, "and all options of train: python -m hvdtrain train --help"
        for title, rows in ({"Options": [*records.values()]} | groups).items():
            if shown := [row for row in rows if row]:
                with formatter.section(title):
                    formatter.write_dl(shown)
        if all_of_train:
            formatter.write_paragraph()
            formatter.write_text(all_of_train)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        given = list(args)  # parsing changes the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = {
                option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            words = [word.partition("=")[0] for word in given]
            unknown = [
                word for word in words if word.startswith("--") and word not in {*known, "--help", "--"}
            ]
            # of -np, the parser names -n
            unknown = unknown or [word for word in words if word.startswith(error.option_name)][:1]
            lines = [f"No such option {word!r}. {_option_hint(word, known)}".rstrip() for word in unknown]
            raise click.UsageError("\n".join(lines) or error.format_message(), ctx) from None


def _option_hint(word: str, known: set[str]) -> str:
    """Return what to write in place of an unknown option, as a sentence; empty if nothing is close."""
    field = meant_field(word, Config.model_fields)
    if advice := advice_for(word):
        return advice
    if field is None:
        return did_you_mean(word, known)
    option = f"--{field.replace('_', '-')}"
    return f"Did you mean {option!r}?" if option in known else f"Did you mean '--set {field}=VALUE'?"


class OrNull(click.ParamType):  # type: ignore[type-arg]
    """A type whose values can also be ``null``, as in a config file."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self.name = kind.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a value, or NULL."""
        return NULL if value in ("null", NULL) else self._kind.convert(value, param, ctx)


class FieldChoice(click.Choice):  # type: ignore[type-arg]
    """A choice that says which word stands for a wrong one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return one of the choices."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            hint = value_hint(param.name or "" if param else "", value, nullable=False)
            if not hint:
                raise
            self.fail(f"{error.message.rstrip('.')}; {hint}.", param, ctx)


class ExpandedPath(click.Path):
    """A path, in which ``~`` and environment variables are expanded."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        try:
            value = expand_path(str(value))
        except ValueError as error:
            self.fail(f"{str(value)!r}: {error}", param, ctx)
        if is_url(value):
            self.fail(f"{shown(value)} is a URL; a path of this host is needed here.", param, ctx)
        return super().convert(value, param, ctx)


class PathOrUrl(ExpandedPath):
    """A path, likewise, or a URL of an object store as text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or the URL."""
        if not is_url(value):
            return super().convert(value, param, ctx)
        try:
            return check_url(expand_path(str(value)))
        except ValueError as error:
            self.fail(str(error), param, ctx)
