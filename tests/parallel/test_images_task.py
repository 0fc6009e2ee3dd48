"""The task images in real jobs: the same curve in both frameworks, and damage that ends a job in words."""

import pytest
from support.image_files import digits, write, write_folder, write_idx
from support.jobs import FRAMEWORKS, launcher, run, temporary_folder
from support.pool import controller_of, train

TRAINED = 1438


@pytest.fixture(scope="module")
def runs():
    """Train on digits as PNG files and as gzipped IDX files, with augmentation, on two workers."""
    images, labels = digits()
    found = {}
    for framework, form in zip(FRAMEWORKS, ("folder", "idx.gz"), strict=True):
        root = temporary_folder()
        if form == "folder":
            # in the order of the files, so that both forms number the images alike
            path = root / "png"
            write_folder(path / "train", *in_order(images[:TRAINED], labels[:TRAINED]))
            write_folder(path / "val", images[TRAINED:], labels[TRAINED:])
        else:
            path = write(form, root, *in_order(images[:TRAINED], labels[:TRAINED]))
            write_idx(path, images[TRAINED:], labels[TRAINED:], "t10k", ".gz")
        options = ["--task", "images", "--framework", framework, "--set", f"task_options.path={path}"]
        options += ["--set", "task_options.augment=[crop]", "--global-batch-size", "64"]
        options += ["--epochs", "2", "--optimizer", "adamw", "--learning-rate", "4e-3"]
        options += ["--set", "eval_every=null"]
        found[framework] = train(2, controller_of(framework, 2), *options, cwd=root, timeout=500)
    return found


def in_order(images, labels):
    order = labels.argsort(kind="stable")
    return images[order], labels[order]


def test_both_frameworks_draw_the_same_curve_from_both_forms(runs):
    assert runs["tf"].losses == pytest.approx(runs["torch"].losses, rel=1e-4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_plan_says_what_was_found(runs, framework):
    (line,) = (line for line in runs[framework].result.stdout.splitlines() if line.startswith("  data "))
    form = {"torch": "image folder", "tf": "IDX files"}[framework]
    assert f"1,438 grey images 8x8 in 10 classes, 359 to evaluate ({form} in " in line
    assert line.endswith("mean 0.3043, std 0.3751")


def test_a_wrong_label_ends_the_job_in_words(tmp_path):
    images, labels = digits()
    labels = labels[:100].copy()
    labels[3] = 77
    path = write_idx(tmp_path / "idx", images[:100], labels)
    command = [*launcher(2, "mpi"), "python", "-m", "hvdtrain", "--framework", "torch", "--task", "images"]
    result = run([*command, "--set", f"task_options.path={path}"], tmp_path, 120)
    assert result.returncode == 2
    assert f"{path}/train-labels-idx1-ubyte, sample 3: label 77 is out of range" in result.output
    assert "Traceback" not in result.output
