"""The commands of docs/serving.md run one after the other, as they stand."""

import shutil

from documents import ROOT, hvdtrain_commands
from jobs import run
from serving import trained


def test_the_pages_commands_run(tmp_path):
    commands = hvdtrain_commands(ROOT / "docs" / "serving.md")
    assert len(commands) == 6
    shutil.copytree(trained("torch").folder, tmp_path / "runs" / "digits")
    for words in commands:
        result = run(words, tmp_path)
        assert result.returncode == 0, f"{words}\n{result.output[-3000:]}"
    assert (tmp_path / "digits.onnx").is_file()
    assert (tmp_path / "runs" / "tuned" / "summary.json").is_file()
    assert len((tmp_path / "runs" / "digits" / "evaluations.jsonl").read_text().splitlines()) == 2
