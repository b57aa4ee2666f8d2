"""A file that is replaced, such as a report, is a new one: links are not followed."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.storage.files import replace_bytes


def test_links_in_place_of_a_file_and_of_its_temporary_name_are_replaced(tmp_path: Path) -> None:
    victim, page = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("untouched")
    for link in (page, tmp_path / f".report.html.{os.getpid()}.tmp"):
        link.symlink_to(victim)

    replace_bytes(page, [b"new"])

    assert victim.read_text() == "untouched"
    assert not page.is_symlink()
    assert page.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "victim"]
