"""The commands of README.md and docs/ run as they stand, in order, in a folder of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = {str(page.relative_to(ROOT)): page
         for page in (README, *sorted((ROOT / "docs").glob("*.md")))}
QUICK = ("docs/data.md", "docs/fine-tuning.md", "docs/hugging-face.md",
         "docs/schedules-and-optimizers.md")
"""Pages that need nothing but README's task, and seconds; those of all others are long."""
PACKAGES = {"docs/data.md": "datasets", "docs/hugging-face.md": "transformers"}
SUITE = "pip install -e '.[test]' && pytest -q -n 2 --dist loadfile"
NEEDS = ("a cluster", "Docker and a network", "GPUs", "Kubernetes", "Slurm", "several nodes")
"""What the comment of a command may name that a test lacks: `# needs GPUs`."""
LIMIT_S = 1500.0
"""For the commands of a page; the longest, of the lab, take five minutes on two cores."""


def fences(page: str) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page].read_text(), re.MULTILINE | re.DOTALL)


def commands(page: str) -> Iterator[str]:
    """The commands of a page that can be run here, and aren't this suite."""
    for language, text in fences(page):
        if language == "bash":
            yield from (line for line in text.splitlines()
                        if line != SUITE and not re.search(rf" # needs ({'|'.join(NEEDS)})", line))


def run(page: str, folder: Path) -> None:
    """Write the files of a page, and run its commands. A command ends with the exit code that its
    comment names, or 0. README's first installs the project, which is what `.ci/run` does."""
    for language, text in fences(page):
        if language == "python" and (name := re.match(r"# (\w+\.py)\n", text)):
            (folder / name[1]).write_text(text)
    path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path),
           "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    with contextlib.ExitStack() as stack:
        for command in commands(page):
            line, background = re.subn(r" &$", "", command.removeprefix("pip install -e . && "))
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(["bash", "-c", line], cwd=folder, env=env,
                                       stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            stack.callback(process.kill)
            if not background:
                told = re.search(r"  # .*exit code (\d+)", line)
                code = process.wait(LIMIT_S)
                output.seek(0)
                assert code == int(told[1] if told else 0), f"{line}\n{output.read()[-5000:]}"


@pytest.fixture(scope="module")
def after_readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which README's commands were run."""
    folder = tmp_path_factory.mktemp("readme")
    run("README.md", folder)
    return folder


def test_each_block_names_its_language_and_each_mark_is_known():
    languages = {(page, language) for page in PAGES for language, _ in fences(page)
                 if language not in ("bash", "python", "text")}
    assert languages == set()
    assert [line for page in PAGES for line in commands(page) if "# needs" in line] == []
    for page in PAGES:
        told = [text for language, text in fences(page) if language == "text"
                if re.search(r"^(python|torchrun) ", text, re.MULTILINE)]
        assert told == [], f"{page}: commands belong into blocks of bash"


@pytest.mark.parametrize("page", QUICK)
def test_the_commands_of_a_page_run(page, tmp_path):
    if (package := PACKAGES.get(page)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install -e '.[test]'")
    readme = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(), re.DOTALL))
    for name, text in readme.items():
        (tmp_path / name).write_text(text)

    run(page, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("page", [page for page in PAGES
                                  if page not in QUICK and any(commands(page))])
def test_the_commands_of_a_page_run_after_those_of_readme(page, after_readme, tmp_path):
    if page == "README.md":
        return  # the fixture
    folder = shutil.copytree(after_readme, tmp_path / "folder")

    run(page, folder)
