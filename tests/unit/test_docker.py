"""The Dockerfiles, their scripts, the compose file and what docs/clusters.md says of them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support.documents import ROOT

DOCKER = ROOT / "docker"
DOCKERFILES = (DOCKER / "Dockerfile", DOCKER / "Dockerfile.gpu")
SCRIPTS = (*sorted(DOCKER.glob("*.sh")), ROOT / "requirements" / "install.sh")
COMPOSE = DOCKER / "compose.yaml"


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


@pytest.mark.parametrize("script", SCRIPTS, ids=by_name)
def test_scripts_are_shell(script):
    assert script.read_text().startswith("#!/bin/sh\n")
    assert "\nset -eu\n" in script.read_text()
    done = subprocess.run(["sh", "-n", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.fixture
def compose():
    return yaml.safe_load(COMPOSE.read_text())


def test_compose_starts_a_head_and_two_workers_of_one_image(compose):
    services = compose["services"]
    assert {name: service["command"][0] for name, service in services.items()} == {
        "head": "head",
        "worker1": "worker",
        "worker2": "worker",
    }
    for name, service in services.items():
        assert service["hostname"] == name
        assert service["image"] == "${HVDTRAIN_IMAGE:-hvdtrain:cpu}"
        build = service["build"]
        assert ((DOCKER / build["context"]).resolve() / build["dockerfile"]) == DOCKERFILES[0]
        assert service["volumes"] == ["cluster:/cluster", "work:/work"]
    assert set(compose["volumes"]) == {"cluster", "work"}
    waits = services["head"]["depends_on"]
    assert waits == {worker: {"condition": "service_healthy"} for worker in ("worker1", "worker2")}
