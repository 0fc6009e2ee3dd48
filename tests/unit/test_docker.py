"""The Dockerfiles, their scripts, the compose file and what docs/docker.md says of them."""

import re
from pathlib import Path

import pytest
from support.documents import ROOT

DOCKER = ROOT / "docker"
DOCKERFILES = (DOCKER / "Dockerfile", DOCKER / "Dockerfile.gpu")
SCRIPTS = (*sorted(DOCKER.glob("*.sh")), ROOT / "requirements" / "install.sh")


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Give the instructions of a Dockerfile: word and the rest, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(None, 1)[1].strip()) for line in lines if line.strip()]


def arguments(dockerfile: Path) -> dict[str, str]:
    """Give the build arguments and their defaults."""
    return dict(rest.partition("=")[::2] for word, rest in instructions(dockerfile) if word == "ARG")


def by_name(path):
    return path.name


@pytest.fixture(params=DOCKERFILES, ids=by_name)
def dockerfile(request):
    return request.param


def test_nothing_is_fetched_past_the_package_managers_and_no_secret_is_given(dockerfile):
    assert "ADD" not in {word for word, _ in instructions(dockerfile)}
    texts = [dockerfile.read_text(), *(script.read_text() for script in SCRIPTS)]
    for text in texts:
        assert not re.search(r"\b(curl|wget)\b", text)
        assert not re.search(r"(?i)(password|token|secret)=", text)
        assert "StrictHostKeyChecking no" not in text
    assert not [name for name in arguments(dockerfile) if re.search("(?i)key|token|secret|password", name)]


def test_every_package_of_an_image_is_checked_by_its_hash_and_comes_from_one_index(dockerfile):
    texts = [dockerfile.read_text(), *(script.read_text() for script in SCRIPTS)]
    for text in texts:
        assert "--extra-index-url" not in text
        for command in re.findall(r"^[^#\n]*\bpip install\b.*$", text, re.MULTILINE):
            assert "--require-hashes" in command or "--no-deps --no-build-isolation" in command
