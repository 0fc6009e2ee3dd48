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


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_packages_alone_are_fetched_and_checked_by_their_hashes_and_no_secret_is_given(dockerfile):
    words = [word for word, _ in instructions(dockerfile)]
    assert "ADD" not in words
    texts = [dockerfile.read_text(), *(script.read_text() for script in SCRIPTS)]
    for text in texts:
        assert not re.search(r"\b(curl|wget)\b", text)
        assert not re.search(r"(?i)(password|token|secret)=", text)
        assert "StrictHostKeyChecking no" not in text
        assert "--extra-index-url" not in text
        for command in re.findall(r"^[^#\n]*\bpip install\b.*$", text, re.MULTILINE):
            assert "--require-hashes" in command or "--no-deps --no-build-isolation" in command
    arguments = [rest for word, rest in instructions(dockerfile) if word == "ARG"]
    assert not [one for one in arguments if re.search("(?i)(key|token|secret|password)[^=]*(=|$)", one)]
