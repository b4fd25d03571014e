"""Files are whole or absent; journals resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmerge.utils.files import Journal, replacing, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text("old", path)

    def interrupted() -> None:
        with replacing(path) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_journal_keeps_whole_lines_of_its_own_run(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    journal = Journal(path, "run 1", "rows")
    assert not path.parent.exists(), "nothing is created before there is a row"
    journal.add({"a": 1})
    journal.add({"a": 2})
    path.write_text(path.read_text() + '{"a": 3')  # killed while it wrote
    again = Journal(path, "run 1", "rows")
    assert again.rows == [{"a": 1}, {"a": 2}]
    again.add({"a": 4})
    assert Journal(path, "run 1", "rows").rows == [{"a": 1}, {"a": 2}, {"a": 4}]
    with pytest.raises(ValueError, match="rows of another model, other images or options, or written by another version"):
        Journal(path, "run 2", "rows")


def test_two_runs_with_the_same_target_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            assert second != first
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
