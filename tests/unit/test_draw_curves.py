"""The picture of the loss curves in README.md: it is what the script draws from the recorded losses."""

import json
import re
import runpy
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from support.documents import ROOT

LARGEST_DIFFERENCE = 4e-7  # relative; README.md and docs/numbers.md state it
RUNS = [f"{title}, {workers}" for title in ("PyTorch", "TensorFlow") for workers in ("1 worker", "2 workers")]


@pytest.fixture(scope="module")
def script():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "draw_curves.py")))


def test_the_picture_is_drawn_from_the_recorded_losses(script):
    assert script.PICTURE.read_text(encoding="utf-8") == script.draw(script.read_losses(script.LOSSES))


def test_the_picture_shows_every_run_and_every_step(script):
    losses = script.read_losses(script.LOSSES)
    assert list(losses) == RUNS
    assert {len(values) for values in losses.values()} == {500}
    picture = ElementTree.fromstring(script.draw(losses))
    lines = [
        element.get("points").split() for element in picture.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    assert [len(points) for points in lines] == [500] * 4
    words = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert set(RUNS) <= set(words)


def test_the_documents_state_the_largest_difference(script):
    curves = list(script.read_losses(script.LOSSES).values())
    largest = max(
        abs(a / b - 1) for one in curves for other in curves for a, b in zip(one, other, strict=True)
    )
    assert 0.5 * LARGEST_DIFFERENCE < largest < LARGEST_DIFFERENCE
    for document in ("README.md", "README.zh-CN.md", "docs/numbers.md"):
        assert "4e-7" in (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", ["README.md", "README.zh-CN.md"])
def test_both_readmes_show_the_picture(document):
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / document).read_text(encoding="utf-8"))
    assert pictures == ["docs/curves.svg"]


def test_losses_of_runs_are_read_and_written_exactly(script, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"framework": "tf", "workers": 2}))
    losses = [2.299893617630005, 0.09873264486139471, 4.250144958496094]
    lines = [{"phase": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    lines.append({"phase": "eval", "step": 3, "loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    name, found = script.read_run(tmp_path)
    assert (name, found) == ("TensorFlow, 2 workers", losses)
    script.write_losses(tmp_path / "losses.csv", {name: found})
    assert script.read_losses(tmp_path / "losses.csv") == {name: pytest.approx(losses, rel=1e-8)}


def test_a_run_without_every_step_is_refused(script, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"framework": "tf", "workers": 1}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"phase": "train", "step": 10, "loss": 1.0}))
    with pytest.raises(SystemExit, match="train with --log-every 1"):
        script.read_run(tmp_path)
