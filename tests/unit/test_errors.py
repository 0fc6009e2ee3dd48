"""The exception tree: what its page says is what there is."""

import inspect
import pickle

import pytest

from hvdtrain import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, BaseException)
}


def test_every_error_but_the_root_ends_with_a_code_of_the_contract():
    no_errors = ("HvdtrainError", "Interrupted", "WorldChanged", "Removed")
    codes = {cls.exit_code for name, cls in CLASSES.items() if name not in no_errors}
    assert codes == {2, 3, 4, 75}


@pytest.mark.parametrize("name", [name for name, cls in CLASSES.items() if issubclass(cls, Exception)])
def test_an_error_travels_between_workers(name):
    error = CLASSES[name]("a: wrong", "Do b.", everywhere=True)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize("name", ["Interrupted", "Stopped", "WorldChanged", "Removed"])
def test_an_end_on_request_is_no_exception_that_a_task_catches(name):
    assert not issubclass(CLASSES[name], Exception)


def test_a_notebook_shows_the_message_after_the_traceback_of_the_tasks_code_alone():
    assert errors.ConfigError("a: wrong", "Do b.")._render_traceback_() == [
        "ConfigError: a: wrong",
        "  Do b.",
    ]
    failure = errors.WorkerFailure("the task failed")
    failure.__cause__ = ValueError("of the task")
    assert failure._render_traceback_() == ["ValueError: of the task", "WorkerFailure: the task failed"]
