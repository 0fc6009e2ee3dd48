"""The Dockerfiles, their scripts, the compose file and what docs/clusters.md says of them."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support.documents import ROOT, blocks

DOCKER = ROOT / "docker"
DOCKERFILES = (DOCKER / "Dockerfile", DOCKER / "Dockerfile.gpu")
SCRIPTS = (*sorted(DOCKER.glob("*.sh")), ROOT / "requirements" / "install.sh")
COMPOSE = DOCKER / "compose.yaml"
# BuildKit's own words, which buildah 1.28 and older Dockers do not know
_INSTRUCTIONS = (
    "ARG",
    "FROM",
    "RUN",
    "CMD",
    "LABEL",
    "EXPOSE",
    "ENV",
    "COPY",
    "ENTRYPOINT",
    "USER",
    "WORKDIR",
)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Give the instructions of a Dockerfile: word and the rest, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(None, 1)[1].strip()) for line in lines if line.strip()]


def stages(dockerfile: Path) -> list[list[tuple[str, str]]]:
    """Give the instructions of each stage, FROM first."""
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions(dockerfile):
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def arguments(dockerfile: Path) -> dict[str, str]:
    """Give the build arguments and their defaults."""
    return dict(rest.partition("=")[::2] for word, rest in instructions(dockerfile) if word == "ARG")


def by_name(path):
    return path.name


@pytest.fixture(params=DOCKERFILES, ids=by_name)
def dockerfile(request):
    return request.param


def test_dockerfiles_need_no_extension_of_the_builder(dockerfile):
    assert {word for word, _ in instructions(dockerfile)} <= {*_INSTRUCTIONS, "HEALTHCHECK"}
    assert "--mount" not in dockerfile.read_text()
    assert "<<" not in dockerfile.read_text()
    assert "syntax=" not in dockerfile.read_text()


def test_every_stage_starts_from_the_same_pinned_debian(dockerfile):
    base = arguments(dockerfile)["BASE"]
    assert re.fullmatch(r"docker\.io/library/debian@sha256:[0-9a-f]{64}", base)
    assert [stage[0][1].split(" AS ")[0] for stage in stages(dockerfile)] == ["${BASE}"] * 2
    assert arguments(DOCKERFILES[0])["BASE"] == base


def test_the_last_stage_runs_as_a_user(dockerfile):
    last = [word for word, _ in stages(dockerfile)[-1]]
    assert [rest for word, rest in stages(dockerfile)[-1] if word == "USER"] == ["${UID}"]
    assert int(arguments(dockerfile)["UID"]) >= 1000
    assert "RUN" not in last[last.index("USER") :]


def test_the_last_stage_has_what_an_engine_asks_for(dockerfile):
    last = dict(stages(dockerfile)[-1])
    assert last["EXPOSE"] == "2222"
    assert '"hvdtrain-health"' in last["HEALTHCHECK"]
    assert last["ENTRYPOINT"] == '["/usr/bin/tini", "--", "hvdtrain-entrypoint"]'
    for label in ("title", "description", "licenses", "base.name", "revision"):
        assert f"org.opencontainers.image.{label}=" in last["LABEL"]


def test_what_is_copied_exists_and_reaches_the_builder(dockerfile):
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for word, rest in instructions(dockerfile):
        if word == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source.split("/")[0] in sent


def test_nothing_is_fetched_past_the_package_managers_and_no_secret_is_given(dockerfile):
    assert "ADD" not in {word for word, _ in instructions(dockerfile)}
    texts = [dockerfile.read_text(), *(script.read_text() for script in SCRIPTS)]
    for text in texts:
        assert not re.search(r"\b(curl|wget)\b", text)
        assert not re.search(r"(?i)(password|token|secret)=", text)
        assert "StrictHostKeyChecking no" not in text
    assert not [name for name in arguments(dockerfile) if re.search("(?i)key|token|secret|password", name)]


def test_every_build_argument_is_explained(dockerfile):
    head = dockerfile.read_text().partition("\nARG ")[0]
    explained = re.findall(r"^# ([A-Z_]+) {2,}", head, re.MULTILINE)
    assert sorted(explained) == sorted(arguments(dockerfile))


def test_images_differ_in_what_is_built_alone():
    cpu, gpu = (
        [pair for pair in stages(path)[-1] if pair[0] not in ("ARG", "LABEL", "ENV")] for path in DOCKERFILES
    )
    assert cpu == gpu


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


def test_scripts_that_an_image_starts_can_be_started():
    for name in ("entrypoint.sh", "health.sh"):
        assert (DOCKER / name).stat().st_mode & 0o111 == 0o111


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


def test_compose_opens_nothing(compose):
    assert set(compose) - {"name", "services", "networks", "volumes"} == {"x-host"}
    assert compose["networks"] == {"job": {}}
    for service in compose["services"].values():
        assert service["networks"] == ["job"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        allowed = {"image", "build", "networks", "volumes", "shm_size", "cap_drop", "security_opt"}
        assert set(service) - allowed <= {"hostname", "command", "depends_on"}


def docker_commands() -> list[list[str]]:
    """Give the commands of the section "Docker" that start docker."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    section = page.partition("\n## Docker\n")[2].partition("\n## ")[0]
    lines = [
        line
        for block in blocks(ROOT / "docs" / "clusters.md")
        if block.language == "bash" and block.text.splitlines()[0] in section
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True)) and words[0] == "docker"]


def test_documented_builds_name_what_there_is():
    builds = [words for words in docker_commands() if words[1] == "build"]
    assert {Path(words[words.index("-f") + 1]).name for words in builds} == {
        path.name for path in DOCKERFILES
    }
    for words in builds:
        file = ROOT / words[words.index("-f") + 1]
        given = [words[at + 1].partition("=")[0] for at, word in enumerate(words) if word == "--build-arg"]
        assert set(given) <= set(arguments(file))
        assert words[-1] == "."


def test_documented_compose_commands_name_what_there_is(compose):
    found = [words for words in docker_commands() if words[1] == "compose"]
    assert {words[4] for words in found} >= {"up", "exec", "down"}
    for words in found:
        assert words[2:4] == ["-f", "docker/compose.yaml"]
        if words[4] == "exec":
            assert words[5] in compose["services"]
            hosts = words[words.index("-H") + 1].split(",")
            assert [host.partition(":")[0] for host in hosts] == list(compose["services"])
            total = sum(int(host.partition(":")[2]) for host in hosts)
            assert int(words[words.index("-np") + 1]) == total


def test_documented_containers_start_as_head_or_worker():
    runs = [words for words in docker_commands() if words[1] == "run"]
    images = [at for words in runs for at, word in enumerate(words) if word.startswith("hvdtrain:")]
    starts = [words[at + 1] for words, at in zip(runs, images, strict=True)]
    assert {"worker", "head"} <= set(starts) <= {"worker", "head", "horovodrun", "python"}
