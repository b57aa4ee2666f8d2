"""Output into a pipe whose reader has gone."""

from __future__ import annotations

import pytest
from unread import ended

from trainer.pipe import EXIT_PIPE, quiet_pipe


@pytest.mark.parametrize(("arguments", "unbuffered", "code"), [
    (["--help"], False, EXIT_PIPE),
    (["compare", "{run}", "{run}"], False, 2),
    (["compare", "{run}", "{run}"], True, EXIT_PIPE),
])
def test_nothing_is_said_of_a_reader_that_has_gone(tmp_path, arguments, unbuffered, code):
    arguments = [text.format(run=tmp_path) for text in arguments]

    found, said = ended("-m", "trainer", *arguments, unbuffered=unbuffered)

    assert (found, "Traceback" in said, "Broken" in said) == (code, False, False)


def test_what_is_cut_off_amid_it_ends_as_a_program_that_sigpipe_has_ended():

    text = "print('x' * 100_000, flush=True)"

    assert ended("-c", "from trainer.pipe import quiet_pipe\nwith quiet_pipe(): " + text
                 ) == (EXIT_PIPE, "")


def test_another_broken_pipe_is_a_failure_like_any_other():
    with pytest.raises(BrokenPipeError), quiet_pipe():
        raise BrokenPipeError
