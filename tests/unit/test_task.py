"""Finding a task, constructing it, and what is said where that fails."""

import sys
import textwrap
from pathlib import Path
from typing import ClassVar

import pytest

from hvdtrain.errors import TaskError
from hvdtrain.jobs.opening.data_sets import make_task, notes_on_members
from hvdtrain.task import load_task_class, task_class_of, task_spec
from hvdtrain.tasks.digits import Digits

GOOD = """
class Good:
    loss = "mse"
    train_data = eval_data = torch_model = lambda self: None

    class Inner:
        pass

    NUMBER = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory; what a task file does to the import system is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(path: Path, text: str = GOOD) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("spec", ["tasks/mine.py:Good", "mine_package.mine:Good", "mine_module:Good"])
def test_a_task_of_ones_own_goes_by_file_or_module(folder, spec):
    write(folder / "tasks" / "mine.py")
    write(folder / "mine_package" / "mine.py")
    write(folder / "mine_module.py")
    assert load_task_class(spec).__name__ == "Good"


def test_a_task_file_imports_what_lies_beside_it_and_may_have_a_dataclass(folder):
    """Dataclasses look their module up while they are made."""
    text = """
        from __future__ import annotations
        from dataclasses import dataclass
        from beside import VALUE

        @dataclass
        class Good:
            size: int = VALUE
    """
    write(folder / "deep" / "beside.py", "VALUE = 7\n")
    write(folder / "deep" / "mine.py", text)
    assert load_task_class("deep/mine.py:Good")().size == 7


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("digit", "no built-in task 'digit'\nDid you mean 'digits'?"),
        ("a/mine.py", "names a file but no class\nWrite a/mine.py:MyTask."),
        ("a/mine.py:Good", "task file a/mine.py does not exist"),
        ("no.such.module:Good", "task module no.such.module cannot be imported: "),
        ("a/mine:Good", "task module 'a/mine' is neither a module's name nor a .py file"),
        ("mine.py:God", "mine.py has no 'God'\nDid you mean 'Good'?"),
        ("mine.py:Zzzz", "mine.py has no 'Zzzz'\nIts tasks: Good."),
        ("mine.py:Good.NUMBER", "Good.NUMBER is a int, not a class"),
    ],
)
def test_what_is_not_there_is_named(folder, spec, said):
    write(folder / "mine.py")
    with pytest.raises(TaskError) as caught:
        load_task_class(spec)
    assert said in str(caught.value)


class Base:
    loss = "mse"
    train_data = eval_data = torch_model = lambda self: None


def why(task_class: object, options: dict, framework: str = "torch") -> str:
    with pytest.raises(TaskError) as caught:
        make_task(task_class, "it", options, framework)
    return str(caught.value)


def test_options_that_do_not_fit_and_what_a_task_lacks_for_its_framework_are_named():
    said = "task_options: got an unexpected keyword argument 'size'\nIt takes none; --set"
    assert said in why(Base, {"size": 1})
    takes_two = type("TakesTwo", (Base,), {"__init__": lambda self, path, size=1: None})
    assert "Did you mean 'size'?" in why(takes_two, {"path": "x", "sise": 1})
    assert "missing a required argument: 'path'\nIt takes path" in why(takes_two, {})
    assert "no method train_data()" in why(type("Part", (Base,), {"train_data": None}), {})
    other = type("Part", (Base,), {"torch_model": None, "tf_model": print})
    assert "torch_model(), which --framework torch needs\nIt has tf_" in why(other, {})
    members = ("train_data", "eval_data", "torch_model", "tf_model", "torch_loss")
    own_loss = type("OwnLoss", (), dict.fromkeys(members, print))
    assert make_task(own_loss, "it", {}, "torch")
    assert "neither loss nor tf_loss(model, batch)" in why(own_loss, {}, "tf")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("metric", {}, "the task has metric, which hvdtrain does not know; did you mean metrics?"),
        ("torch_optimiser", print, "did you mean torch_optimizer()?"),
        ("evalData", print, "did you mean eval_data()?"),
        ("collate_fn", print, "the methods are collate(samples) and train_collate(samples)"),
        ("training_step", print, "here torch_loss(model, batch) or"),
    ],
)
def test_a_member_that_is_misspelt_or_of_another_trainer_is_noted(name, value, said):
    inherits = type("Part", (Base,), {name: value})
    (note,) = notes_on_members(type("More", (inherits,), {})())
    assert said in note


class WithHelpers(Base):
    default_path = "here"
    eval_path = predict_path = "there"
    metrics: ClassVar = {"mae": "mae"}
    metric = "mae"  # beside metrics

    def __init__(self):
        self.cache, self.lr = {}, 0.1

    def eval_data(self):
        return self.held_out()

    held_out = Base.eval_data

    def torch_optimizer(self, parameters):
        return [self.lr for _ in parameters]


def test_helpers_of_a_task_get_no_note():
    import unittest

    # members of a library's class are not the user's
    assert not notes_on_members(type("Part", (WithHelpers, unittest.TestCase), {"lr": 3})())


def test_another_process_finds_a_class_by_its_spec_and_an_instance_is_the_task_itself():
    assert load_task_class(task_spec(Digits)) is Digits
    task = type("WithDefaults", (Base,), {"defaults": {"epochs": 2, "task_options": {"size": 3}}})()
    made_by = task_class_of(task)
    assert make_task(made_by, "it", {}, "torch") is task
    assert made_by.defaults == {"epochs": 2}
    assert "argument 'size'\nIt was passed as an instance: give" in why(made_by, {"size": 3})
