"""The command ``batch-find``."""

from hvdtrain.bench.interruption import said_if_interrupted
from hvdtrain.bench.options import check_writable, config_files
from hvdtrain.config import Layer
from hvdtrain.search.batch_find import run_batch_find
from hvdtrain.search.launched import check_is_not_launched
from hvdtrain.search.options import BatchOptions
from hvdtrain.search.output import say, tell


def run_batch_find_command(layers: list[Layer], options: BatchOptions) -> None:
    """Find a micro-batch, show what was found, and write it where the options say.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.

    Raises:
        UsageError: If a launcher started this process, or the job would be refused.
        EnvironmentFault: If the job fails as it is.
    """
    check_is_not_launched("batch-find")
    check_writable(options.json_path, read=config_files(layers))
    with said_if_interrupted(say):
        found = run_batch_find(layers, options, say)
    tell(found.describe(), found.to_document(), options.json_path)
