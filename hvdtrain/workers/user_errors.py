"""What is said of an exception of user code: the user's own line that led to it, and its text in short."""

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from hvdtrain.errors import NOT_THE_TASKS, HvdtrainError, TaskError

# how a note on an exception begins that says which sample was being read
SAMPLE_NOTE = "sample "
# what TensorFlow writes above the stack of a graph's operation
_GRAPH_ERROR = "Graph execution error"
# what torchvision says with a PyTorch that it was not built for, and what helps
_TORCHVISION = "torchvision::nms does not exist"
_OTHER_BUILD = (
    "torchvision was built for another PyTorch: install both from one index, or `pip uninstall torchvision`, "
    "which transformers and torchmetrics do without. `python -m hvdtrain doctor` imports them."
)
# where the C++ frames begin that PyTorch adds to some of its texts
_FRAMES = "Exception raised from "
# folders whose code is not the user's
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    str(Path(__file__).resolve().parents[1]),
)
# the file that imports and constructs tasks
_LOADER = str(Path(__file__).parents[1] / "task.py")


class RaisedInReader(Exception):
    """An exception of a data set in a reader process, raised again in its worker."""

    def __init__(self, where: str, traceback_text: str = "") -> None:  # as it is unpickled
        super().__init__(where)
        self.where = where
        self.traceback_text = traceback_text


def traceback_of(error: BaseException | None) -> str:
    """Return the traceback of an exception of user code: where a reader process raised it, that one's."""
    if isinstance(error, RaisedInReader):
        return error.traceback_text
    return "" if error is None else "".join(traceback.format_exception(error))


@contextmanager
def task_errors(problem: str, kind: type[HvdtrainError] = TaskError) -> Iterator[None]:
    """Return a context that calls user code, whose exceptions become an error of hvdtrain."""
    try:
        yield
    except NOT_THE_TASKS:
        raise
    except BaseException as error:
        raise kind(f"{problem}: {where_raised(error)}") from error


def where_raised(error: BaseException, own_only: bool = False) -> str:
    """Return an exception of user code with the user's own line that led to it, in a few lines."""
    if isinstance(error, RaisedInReader):
        return error.where
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    samples = [note for note in getattr(error, "__notes__", ()) if note.startswith(SAMPLE_NOTE)]
    text = f"{type(error).__name__}: {_text_of(error)}" + "".join(f" ({note})" for note in samples)
    if isinstance(error, ImportError) and error.__cause__ is not None:  # which a package may hide
        innermost, seen = error.__cause__, set[int]()
        while innermost.__cause__ is not None and id(innermost) not in seen:
            seen.add(id(innermost))
            innermost = innermost.__cause__
        text += f"\n  Its cause: {type(innermost).__name__}: {_text_of(innermost)}"
    text += f"\n  {_OTHER_BUILD}" if _TORCHVISION in text else ""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(f.filename, f.lineno or 0) for f in frames if _is_shown(f.filename)]
    # TensorFlow's text of an error in a graph lists files and lines
    listed = re.findall(r'File "([^"]+)", line (\d+)', str(error)) if _GRAPH_ERROR in str(error) else []
    known = [*places, *((name, int(line)) for name, line in listed)]
    own = [place for place in known if _is_user_code(place[0])]
    if own_only or not places:
        places = own
    if not places:
        return text
    filename, line = (own or places)[-1]
    return f"{filename}, line {line}: {text}"


def _is_shown(filename: str) -> bool:
    return "importlib" not in filename and filename != _LOADER


def _is_user_code(filename: str) -> bool:
    if not _is_shown(filename) or filename.startswith("<"):
        return False
    parts = Path(filename).parts
    in_package = "site-packages" in parts or "dist-packages" in parts
    return not in_package and not any(Path(filename).is_relative_to(folder) for folder in _LIBRARIES)


def _text_of(error: BaseException) -> str:
    """Return an exception's text without terminal codes and without the lists that frameworks add."""
    text = click.unstyle(str(error)).partition(_FRAMES)[0].rstrip()  # Keras writes some errors in colour
    if _GRAPH_ERROR in text:  # its own text is the last paragraph; the stack of the graph precedes it
        paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
        own = [p for p in paragraphs[1:] if not p.startswith(("File ", "Detected at", "Stack trace"))]
        text = own[-1] if own else text
        text = re.sub(r"\n\t \[\[.*", "", text, flags=re.DOTALL)
    if text.startswith("Exception encountered when calling"):
        text = text.partition("\n\nArguments received by")[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip()) if "\n\n" in text else text
