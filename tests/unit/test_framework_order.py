"""Triton is loaded before TensorFlow, or PyTorch is refused: it would end the process with SIGSEGV."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

LOAD = "from hvdtrain.host.frameworks import {name}; {name}()"
# they fail in the wrong order, as the libraries do
FILES = {
    "triton/__init__.py": "__version__ = '3.7.1'\nimport sys\nassert 'tensorflow' not in sys.modules\n",
    "tensorflow/__init__.py": "import tensorflow.python.pywrap_dlopen_global_flags\n",
    "tensorflow/python/__init__.py": "",
    "tensorflow/python/pywrap_dlopen_global_flags.py": "",
}


@pytest.fixture
def python(tmp_path):
    """Runs code that finds these."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(code: str) -> "subprocess.CompletedProcess[str]":
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    return run


def test_triton_comes_before_what_a_tasks_file_imports(python, tmp_path):
    (tmp_path / "task.py").write_text("import tensorflow\nclass Task: pass\n")
    task = f"{tmp_path / 'task.py'}:Task"
    load = f"from hvdtrain.task import load_task_class; load_task_class({task!r})"
    done = python(f"{load}\nimport triton\n{LOAD.format(name='require_triton_before_tensorflow')}")
    assert done.returncode == 0, done.stderr


def test_pytorch_after_tensorflow_is_refused_with_what_to_write(python):
    done = python(f"import tensorflow\n{LOAD.format(name='require_triton_before_tensorflow')}")
    assert done.returncode == 1
    assert "EnvironmentFault: This process has loaded TensorFlow" in done.stderr
    assert "import triton" in done.stderr


def test_an_older_triton_and_a_folder_of_that_name_are_no_reason_to_refuse(python, tmp_path):
    code = f"import tensorflow\n{LOAD.format(name='require_triton_before_tensorflow')}"
    init = tmp_path / "triton" / "__init__.py"
    init.write_text("__version__ = '3.6.0'\n")
    assert python(code).returncode == 0
    init.unlink()
    own = "import hvdtrain.host.frameworks; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]"
    load = f"{LOAD.format(name='load_triton')}; assert 'triton' not in sys.modules"
    assert python(f"{own}\n{load}\n{code}").returncode == 0


@pytest.mark.may_skip
@pytest.mark.skipif(
    not (find_spec("triton") and find_spec("tensorflow")), reason="PyTorch for CPUs has no Triton"
)
def test_both_frameworks_work_in_one_process_in_that_order():
    code = f"{LOAD.format(name='load_triton')}; import tensorflow, torch._dynamo"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
