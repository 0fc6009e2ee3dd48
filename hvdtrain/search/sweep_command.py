"""The command ``sweep``."""

from pathlib import Path

from hvdtrain.config import Layer
from hvdtrain.errors import Interrupted, UsageError
from hvdtrain.search.launched import check_is_not_launched
from hvdtrain.search.options import SweepOptions
from hvdtrain.search.output import say, tell, write_text
from hvdtrain.search.sweep_plan import make_plan


def run_sweep_command(path: Path | None, layers: list[Layer], options: SweepOptions) -> None:
    """Run a sweep or continue it, show its trials, and write them where the options say.

    Args:
        path: the sweep's file; None if options say all.
        layers: the job's config values from the command line, weakest source first.
        options: the options of the command.

    Raises:
        UsageError: If a launcher started this process, or the sweep or its jobs would be refused.
        EnvironmentFault: If its folder cannot be used.
        Interrupted: If a signal ended it; the trials that had ended are shown before.
    """
    check_is_not_launched("sweep")
    plan = make_plan(path, layers, options)
    from hvdtrain.search.study import SweepStudy
    from hvdtrain.search.sweep import run_sweep
    from hvdtrain.search.sweep_table import SweepTable

    ended: BaseException | None = None
    try:
        study = run_sweep(plan, say)
    except (Interrupted, UsageError) as error:
        if not plan.folder.is_dir():
            raise
        ended, study = error, SweepStudy(plan)
    table = SweepTable.of(plan, study)
    tell(table.describe(), table.to_document(), options.json_path)
    if options.csv_path is not None:
        write_text(options.csv_path, table.to_csv())
    if isinstance(ended, Interrupted):
        say("interrupted: the same command continues where it was")
    if ended is not None:
        raise ended
