"""The command ``report``."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.reporting.jsonl import write_whole
from hvdtrain.reporting.stored_runs import find_runs, plain
from hvdtrain.storage.text import counted

_LARGE_MB = 2.0


def write_report(run_dirs: Sequence[Path], output: Path, verify: bool) -> str:
    """Write a page of runs; return what was written, in words.

    Args:
        run_dirs: directories of runs, or folders that hold such directories.
        output: the file to write.
        verify: whether to check every byte of the checkpoints.

    Raises:
        UsageError: If there is no run, the file has a wrong name, or Bokeh is not installed.
        EnvironmentFault: If the file cannot be written.
    """
    if find_spec("bokeh") is None:
        raise UsageError(
            "report: Bokeh, which draws the curves, is not installed",
            "Install it: python -m pip install 'hvdtrain[report]'.",
        )
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {output}: the name must end in .html")
    if output.exists() and not output.is_file():
        raise UsageError(f"-o {output}: it is there and is no file")
    paths, left_out = find_runs(run_dirs)

    from hvdtrain.tools.report.page import read_for_page, render

    page = render(read_for_page(paths, verify))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, page)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {output}: {error.strerror or error}") from None
    size = len(page.encode()) / 1e6
    lines = [f"{plain(str(output))}: {counted(len(paths), 'run')}, {size:.1f} MB"]
    if size > _LARGE_MB:
        lines.append("note: the page is large; of fewer runs it is smaller")
    return "\n".join([*lines, *(f"note: {note}" for note in left_out)])
