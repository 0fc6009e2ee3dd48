"""Triton is loaded before TensorFlow, or PyTorch is refused: it would end the process with SIGSEGV."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

LOAD = "from hvdtrain.frameworks import {name}; {name}()"
# stand-ins, whose order is what counts
FILES = {
    "triton/__init__.py": "import sys\nassert 'tensorflow' not in sys.modules, 'SIGSEGV'\n",
    "tensorflow/__init__.py": "import tensorflow.python.pywrap_dlopen_global_flags\n",
    "tensorflow/python/__init__.py": "",
    "tensorflow/python/pywrap_dlopen_global_flags.py": "",
}


@pytest.fixture
def python(tmp_path):
    """Runs code beside the stand-ins."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(code: str) -> "subprocess.CompletedProcess[str]":
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    return run


def test_triton_comes_before_what_a_tasks_file_imports(python, tmp_path):
    (tmp_path / "task.py").write_text("import tensorflow\nclass Task: pass\n")
    load = (
        f"from hvdtrain.task import load_task_class; load_task_class({str(tmp_path / 'task.py')!r} + ':Task')"
    )
    done = python(f"{load}\nimport triton\n{LOAD.format(name='require_triton_before_tensorflow')}")
    assert done.returncode == 0, done.stderr


def test_pytorch_after_tensorflow_is_refused_with_what_to_write(python):
    done = python(f"import tensorflow\n{LOAD.format(name='require_triton_before_tensorflow')}")
    assert done.returncode == 1
    assert "EnvironmentFault: This process has loaded TensorFlow" in done.stderr
    assert "import triton" in done.stderr


@pytest.mark.parametrize("name", ["load_triton", "require_triton_before_tensorflow"])
def test_without_triton_nothing_is_loaded_or_refused(python, tmp_path, name):
    (tmp_path / "triton" / "__init__.py").unlink()
    (tmp_path / "triton").rmdir()
    done = python(
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name: None if name == 'triton' else find(name)\n"
        f"import tensorflow\n{LOAD.format(name=name)}\nassert 'triton' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.may_skip
@pytest.mark.skipif(
    not (find_spec("triton") and find_spec("tensorflow")), reason="PyTorch for CPUs has no Triton"
)
def test_both_frameworks_work_in_one_process_in_that_order():
    code = f"{LOAD.format(name='load_triton')}; import tensorflow, torch._dynamo"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
