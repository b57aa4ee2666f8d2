"""What an exception is taken for."""

from __future__ import annotations

import pytest

from trainer.distributed.peer_errors import lost_peer
from trainer.resilience.diagnosis import diagnose

WORDS = "Connection reset by peer"


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error from cause
    return caught.value


def test_gloos_words_in_the_users_own_raise_are_no_echo_unless_it_handles_one():
    gloos = RuntimeError(WORDS)  # from C: no frame of a user's is the innermost
    assert lost_peer(gloos)
    assert not lost_peer(raised(RuntimeError(WORDS)))
    assert lost_peer(raised(RuntimeError(f"in my loss: {WORDS}"), gloos))
    assert not lost_peer(raised(RuntimeError("another"), gloos))


@pytest.mark.parametrize(("text", "memory", "helps"), [
    ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "rank", ""),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "rank", ""),
    ("NCCL error in: ProcessGroupNCCL.cpp:94\nLast error:\nCuda failure 2 'out of memory'",
     "rank", ""),
    ("CUDA error: device-side assert triggered", None, "label above the number of classes"),
    ("CUDA error: an illegal memory access was encountered", None, "CUDA_LAUNCH_BLOCKING=1"),
    ("CUDA error: uncorrectable ECC error encountered", None, "leave it out"),
    ("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
     "use the 'spawn' start method", None, "--data.workers 0")])
def test_errors_of_a_gpu_have_a_remedy(text: str, memory: str | None, helps: str) -> None:
    found = diagnose(RuntimeError(text))

    assert found.memory == memory
    assert helps in found.message


def test_of_errors_of_a_gpu_the_first_is_told_since_every_later_call_fails():
    def exchange() -> None:
        try:
            raise RuntimeError("CUDA error: device-side assert triggered")
        finally:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError) as caught:
        exchange()

    assert "label above the number of classes" in diagnose(caught.value).message


@pytest.mark.parametrize(("text", "is_import"), [
    ("No module named 'nowhere'", True),
    ("libx.so: failed to map segment from shared object", False)])
def test_a_library_for_which_memory_is_short_is_no_code_that_can_not_be_imported(text, is_import):
    assert diagnose(raised(ImportError(text))).is_import == is_import


def test_of_a_group_what_is_in_it_is_told_and_the_line_of_the_first():
    found = diagnose(raised(ExceptionGroup("two at once", [raised(MemoryError()), KeyError("b")])))

    assert found.message == "two at once (MemoryError; KeyError: 'b')"
    assert found.where is not None
    assert found.where.endswith("in raised")
    assert found.memory == "rank"


@pytest.mark.parametrize(("operation", "remedy"), [
    ("nll_loss2d_forward_out_cuda_template", "movedim(1, -1)"),
    ("upsample_bilinear2d_backward_out_cuda", "repeat_interleave"),
    ("kthvalue CUDA", "sort()"), ("of_a_later_version", "--numerics.deterministic off")])
def test_an_operation_without_a_deterministic_kernel_is_named_with_what_has_one(operation, remedy):
    found = diagnose(raised(RuntimeError(
        f"{operation} does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off …"))).message

    assert f"{operation.split()[0]} must be replaced" in found
    assert remedy in found
