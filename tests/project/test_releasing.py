"""The files of a release agree: version, changelog, images, workflows, and the program that checks the wheel."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from tools.dist import EXTRAS, first_program

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def commands(name: str) -> list[str]:
    """The commands that a workflow runs."""
    jobs = yaml.safe_load((ROOT / ".github/workflows" / name).read_text("utf-8"))["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_the_newest_section_of_the_changelog_is_this_version() -> None:
    sections = re.findall(r"^## \[(.*)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.MULTILINE)
    assert sections[0] == ("Unreleased", "")
    assert sections[1][0] == PROJECT["version"]
    assert all(date for _, date in sections[1:])


def test_the_images_have_this_version() -> None:
    files = [path for path in (ROOT / "docker").rglob("*") if path.is_file()]
    named = {
        version
        for path in [*files, ROOT / "docs/deploy.md"]
        for version in re.findall(r"lmpool-\w+:(?:\$\{\w+:-)?(\d+\.\d+\.\d+)", path.read_text("utf-8", "replace"))
    }
    assert named == {PROJECT["version"]}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_its_actions_and_has_few_rights(path: Path) -> None:
    text = path.read_text("utf-8")
    actions = re.findall(r"uses: (.*)", text)
    assert actions
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in actions)
    assert yaml.safe_load(text)["permissions"] in ({}, {"contents": "read"})


def test_the_workflow_runs_the_same_commands_as_a_developer() -> None:
    assert ".ci/run" in commands("ci.yml")
    assert any(command.startswith("make dist ") for command in commands("ci.yml"))
    assert re.search(r"^dist:\n\t.* -m tools\.dist ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    (cut,) = (command for command in commands("release.yml") if command.startswith("awk "))
    script = cut.partition(" > ")[0]
    environment = {"TAG": f"v{PROJECT['version']}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert done.stdout.strip() in CHANGELOG
    assert "\n## " not in done.stdout


def test_the_first_program_of_the_readme_is_found() -> None:
    program = first_program((ROOT / "README.md").read_text("utf-8"))
    assert "producer.logprobs(ids)" in program
    compile(program, "first.py", "exec")
    assert set(EXTRAS.split(",")) <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_the_forms_of_issues_have_required_fields(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / name).read_text("utf-8"))
    assert any(field.get("validations", {}).get("required") for field in form["body"])
    labels = " ".join(field["attributes"].get("label", "") for field in form["body"])
    assert name != "bug.yml" or "`lmpool doctor`" in labels
