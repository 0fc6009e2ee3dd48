"""Whether a job's task and options are those of a checkpoint: config.yaml has whole paths for them."""

from types import SimpleNamespace

import pytest

from hvdtrain.jobs.opening.data_identity import same_field


@pytest.mark.parametrize(
    ("name", "before", "now", "is_same"),
    [
        ("task", {"task": "mine.py:Mine"}, {"task": "/first/mine.py:Mine"}, True),
        ("task", {"task": "mine.py:Mine"}, {"task": "mine.py:Other"}, False),
        ("task", {"task": "images"}, {"task": "text"}, False),
        ("task_options", {"path": "images"}, {"path": "/first/images"}, True),
        ("task_options", {"path": "images"}, {"path": "others"}, False),
        ("task_options", {"path": "images", "model": "a"}, {"path": "images", "model": "b"}, False),
    ],
)
def test_paths_are_the_same_from_another_folder(name, before, now, is_same):
    given = [one if name == "task" else {"task": "images", "task_options": one} for one in (before, now)]
    found = SimpleNamespace(manifest=SimpleNamespace(config=given[0]))
    assert same_field(name, found, given[1]) is is_same
