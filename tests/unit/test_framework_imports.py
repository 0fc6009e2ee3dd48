"""Frameworks are imported without garbage collections, and without what they import in vain."""

import gc
import subprocess
import sys

import pytest

from hvdtrain.backends import quick_imports


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects):
    assert gc.isenabled()
    try:
        if not collects:
            gc.disable()
        with quick_imports():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_keras_has_the_wrappers_that_are_postponed():
    """In a process of its own: here Keras may have been imported already."""
    script = """
import sys
from hvdtrain.backends import quick_imports
with quick_imports():
    import keras
assert "sklearn" not in sys.modules, "nothing is saved"
from keras.wrappers import SKLearnClassifier
assert keras.wrappers.SKLearnClassifier is SKLearnClassifier
assert "sklearn" in sys.modules
assert SKLearnClassifier(keras.Sequential([keras.layers.Dense(1)])).get_params()["model"] is not None
assert {"SKLearnRegressor", "SKLearnTransformer"} <= set(dir(keras.wrappers))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


END = """
import atexit, gc, sys, types
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # registered first, it runs last
sys.argv = ["hvdtrain"]
sys.modules["triton"] = types.ModuleType("triton")
sys.modules["triton"].__version__ = "{version}"
from hvdtrain.backends import quick_imports
with quick_imports():
    import wave
"""


@pytest.mark.parametrize(("version", "frozen"), [("3.8.0", True), ("3.9.0", False)])
def test_objects_of_a_triton_that_reports_them_are_freed_at_the_end(version, frozen):
    command = [sys.executable, "-c", END.format(version=version)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(frozen)]
