"""A notice that a machine will be taken away."""

from __future__ import annotations

from runs import TAPE, codes, events, run


def test_a_notice_to_one_machine_stops_all_ranks(ranks, tmp_path, capfd):
    path = tmp_path / "run"
    run(ranks, 2, path, *TAPE, "--steps=20000",
        f"--stop.on-notice=grep -q . {path}/metrics.jsonl", code=75)

    step = events(path, "stop")[0]["step"]
    assert step >= 1
    assert [e["rank"] for e in events(path, "notice")] == [0]
    assert "has ended; the run saves and stops" in capfd.readouterr().out
    assert codes(ranks, 2, *TAPE, "--steps=9", f"--run-dir={path}2",
                 "--stop.on-notice=no-such-command") == [2, 2]
    assert not (tmp_path / "run2").exists()
