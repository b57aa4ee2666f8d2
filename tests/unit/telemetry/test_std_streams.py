"""Output into a pipe whose reader has gone."""

from __future__ import annotations

import io
import os
import sys

import pytest
from unread import ended

from launch.fork_server import fork, run_worker
from trainer.telemetry.events import Log
from trainer.telemetry.std_streams import EXIT_PIPE, quiet_broken_pipe, say


@pytest.mark.parametrize(("arguments", "unbuffered", "code"), [
    (["--help"], False, EXIT_PIPE),
    (["compare", "{run}", "{run}"], False, 2),
    (["--help"], True, EXIT_PIPE)])
def test_nothing_is_said_of_a_reader_that_has_gone(tmp_path, arguments, unbuffered, code):
    arguments = [text.format(run=tmp_path) for text in arguments]

    found, said = ended("-m", "trainer", *arguments, unbuffered=unbuffered)

    assert (found, "Traceback" in said, "Broken" in said) == (code, False, False)


def test_another_broken_pipe_is_a_failure_like_any_other():
    with pytest.raises(BrokenPipeError), quiet_broken_pipe():
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_line_for_which_there_is_no_stream_is_dropped(monkeypatch, stream):
    if stream:
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)

    say("a word")
    Log().error("a line")


def test_a_rank_that_can_tell_nobody_of_its_end_ends_all_the_same():
    def main(argv):
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        sys.stdout.close()
        sys.stderr.close()
        raise ValueError("in a task")

    ours, theirs = os.pipe()
    if (pid := fork()) == 0:
        try:
            run_worker(main, [], {"RANK": "0"}, launcher_fd=theirs, output_fds=(), close_fds=())
        finally:
            os._exit(99)  # a copy of what had forked it

    _, status = os.waitpid(pid, 0)
    os.close(ours)
    os.close(theirs)
    assert os.waitstatus_to_exitcode(status) == 1
