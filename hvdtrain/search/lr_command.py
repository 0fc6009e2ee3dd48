"""The command ``lr-find``."""

from hvdtrain.bench.interruption import said_if_interrupted
from hvdtrain.bench.options import check_writable, config_files
from hvdtrain.bench.picture import check_picture
from hvdtrain.config import Layer
from hvdtrain.host.launcher import launched_rank
from hvdtrain.host.launches import output_rank
from hvdtrain.jobs.setup import check_may_be_elastic
from hvdtrain.search.lr_find import checked_rise, lr_find_job
from hvdtrain.search.lr_finding import draw_rates
from hvdtrain.search.options import RateOptions
from hvdtrain.search.output import say, tell


def run_lr_find(layers: list[Layer], options: RateOptions) -> None:
    """Collective. Find a learning rate, show what was found, and write it where the options say.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.

    Raises:
        HvdtrainError: as training would raise it.
    """
    check_may_be_elastic(None)
    rise = checked_rise(options.lowest_rate, options.highest_rate, options.rising_steps)
    if not launched_rank():
        check_writable(options.json_path, options.picture, read=config_files(layers))
        if options.picture is not None:
            check_picture(options.picture)
    with said_if_interrupted(say):
        found = lr_find_job(layers, rise)
    if not output_rank():
        tell(found.describe(), found.to_document(), options.json_path, options.picture, draw_rates)
