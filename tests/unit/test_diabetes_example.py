"""The example that reads a user's table: its columns, its scale, and cells that are no numbers."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "diabetes.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("diabetes_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder, *lines):
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_table_of_ones_own(example, tmp_path):
    random = np.random.RandomState(0)
    rows = random.randn(20, 2)
    path = write(tmp_path, "rooms,price,constant", *(f"{a},{b * 9 + 50},1" for a, b in rows))
    task = example.Diabetes(csv=path, target="price")
    (inputs, targets), (eval_inputs, eval_targets) = task.train_data(), task.eval_data()
    assert (inputs.shape, targets.shape, eval_inputs.shape, eval_targets.shape) == (
        (15, 2),
        (15, 1),
        (5, 2),
        (5, 1),
    )
    np.testing.assert_allclose(targets.std(), 1, rtol=1e-6)
    np.testing.assert_allclose(inputs[:, 1], 0)
    in_order = np.sort(np.concatenate([targets, eval_targets])[:, 0])
    differences = np.diff(in_order) / np.diff(np.sort(rows[:, 1] * 9))
    np.testing.assert_allclose(differences, 1 / scale(rows), rtol=1e-3)
    mae = task.metrics["mae"](np.zeros((15, 1)), {"targets": targets})
    np.testing.assert_allclose(mae.mean() / abs(targets).mean(), scale(rows), rtol=1e-5)


def scale(rows):
    """Return the deviation of the training part in the units of the column."""
    shuffled = np.random.RandomState(0).permutation(len(rows))
    return (rows[shuffled[5:], 1] * 9).std()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("a,target", "1,2", "x,3"), "line 3, column 'a': 'x' is no number"),
        (("a,target", "1,"), "line 2, column 'target': '' is no number"),
        (("a,target", "1"), "line 2, column 'target': '' is no number"),
        (("a,target", "1,2,3"), "line 2, column '': "),
        (("a,target", "1,nan"), "line 2, column 'target': 'nan' is not finite"),
        (("a,b", "1,2"), "there is no column 'target' beside others; the table has a, b"),
        (("target", "1"), "there is no column 'target' beside others; the table has target"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(example, tmp_path, lines, said):
    with pytest.raises(ValueError, match=said):
        example.Diabetes(csv=write(tmp_path, *lines))
