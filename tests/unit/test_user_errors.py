"""What is said of an exception of user code."""

import inspect
import json
import pickle
import re

import pytest

from hvdtrain import errors
from hvdtrain.workers.user_errors import where_raised


def raised(work) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError


def test_the_last_line_of_the_users_own_is_named_not_a_librarys():
    def own():
        return json.loads("{")  # the standard library raises

    line = own.__code__.co_firstlineno + 1
    found = where_raised(raised(own))
    assert found.startswith(f"{__file__}, line {line}: JSONDecodeError: Expecting property name")


def test_an_exception_of_a_library_alone_names_its_last_line_unless_the_users_is_wanted():
    error = raised(lambda: json.loads("{"))
    while error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    assert re.match(r".*json/decoder\.py, line \d+: JSONDecodeError", where_raised(error))
    assert where_raised(error, own_only=True).startswith("JSONDecodeError: Expecting")


def test_notes_that_name_a_sample_are_shown_and_others_are_not():
    error = ValueError("cannot decode")
    error.add_note("sample 7")
    error.add_note("Hypothesis was here")
    assert where_raised(error) == "ValueError: cannot decode (sample 7)"


def test_a_failed_import_says_what_it_began_with_and_what_helps():
    cause = RuntimeError("operator torchvision::nms does not exist")
    error = ModuleNotFoundError("Could not import module 'Bert'.")
    error.__cause__ = cause
    said = where_raised(error).splitlines()
    assert said[0].endswith("ModuleNotFoundError: Could not import module 'Bert'.")
    assert said[1] == "  Its cause: RuntimeError: operator torchvision::nms does not exist"
    assert "pip uninstall torchvision" in said[2]
    assert "pip uninstall torchvision" in where_raised(cause)


CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, BaseException)
}


def test_every_error_but_the_root_ends_with_a_code_of_the_contract_and_an_end_is_not_caught_by_a_task():
    no_errors = ("HvdtrainError", "Interrupted", "WorldChanged", "Removed")
    codes = {cls.exit_code for name, cls in CLASSES.items() if name not in no_errors}
    assert codes == {2, 3, 4, 75}
    ends = {name for name, cls in CLASSES.items() if not issubclass(cls, Exception)}
    assert ends == {"Interrupted", "Stopped", "WorldChanged", "Removed"}


@pytest.mark.parametrize("name", [name for name, cls in CLASSES.items() if issubclass(cls, Exception)])
def test_an_error_travels_between_workers(name):
    error = CLASSES[name]("a: wrong", "Do b.", everywhere=True)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_a_notebook_shows_the_message_after_the_traceback_of_the_tasks_code_alone():
    assert errors.ConfigError("a: wrong", "b")._render_traceback_() == ["ConfigError: a: wrong", "  b"]
    failure = errors.WorkerFailure("the task failed")
    failure.__cause__ = ValueError("of the task")
    assert failure._render_traceback_() == ["ValueError: of the task", "WorkerFailure: the task failed"]
