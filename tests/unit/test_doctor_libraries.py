"""Libraries that tasks import: which can be imported here, and why one cannot."""

import os
import subprocess
import sys

import pytest

FILES = {
    "torchvision/__init__.py": "raise RuntimeError('operator torchvision::nms does not exist')",
    "transformers/__init__.py": """
        try:
            import torchvision
        except RuntimeError as error:
            raise ImportError('Could not import module PreTrainedModel.') from error""",
    "torchmetrics/__init__.py": "import os; os.abort()",
    "datasets/__init__.py": "",
}


@pytest.fixture
def said(tmp_path):
    """What is printed where these are the installed libraries."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text.replace("\n        ", "\n"))
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.tools.doctor.software"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


def test_each_failure_has_its_cause_and_what_helps(said):
    lines = said.splitlines()
    assert lines[0].startswith("datasets ")
    assert lines[0].endswith(" can be imported.")
    cause = " cannot be imported: RuntimeError: operator torchvision::nms does not exist"
    for line, name in zip(lines[1::2], ("torchvision", "transformers", "torchmetrics"), strict=True):
        assert line.startswith(f"{name} ")
        assert line.endswith(cause if name != "torchmetrics" else "SIGABRT")
    assert "pip uninstall torchvision" in lines[2]
    assert "pip uninstall torchvision" in lines[4]
    assert "pip install --force-reinstall torchmetrics" in lines[6]
