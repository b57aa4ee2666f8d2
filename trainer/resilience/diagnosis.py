"""Explain an exception to the user: kind, message, line of user code, and remedies."""

from __future__ import annotations

import re
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any

from trainer.distributed.peer_errors import TRAINER_FOLDER, foreignness, lost_peer, text_of
from trainer.errors import EXIT_CONFIG, EXIT_FAILURE, PeerFailed, TrainerError
from trainer.resilience.attempts import failure_sentence
from trainer.resilience.launcher_channel import record_failure, tell
from trainer.storage.files import display_path
from trainer.storage.secrets import mask
from trainer.telemetry.events import Log, writable
from trainer.telemetry.std_streams import say


def forget_workers() -> None:
    """Ignore the death of loader workers from now on: torch would raise at any line."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class Failure:
    """The exception that ended this rank."""

    def __init__(self, log: Log, config: Any = None) -> None:
        self._log, self._config = log, config  # the configuration of the run, once it is parsed
        self._error: BaseException | None = None  # its frames hold memory: dropped by `explain`
        self._found: Diagnosis | None = None
        self._event: dict[str, Any] = {}

    def note(self, error: BaseException, *, step: int | None = None) -> None:
        """Record the failure, once, at a step (default: the last complete one), before the save
        that follows, which may take long."""
        forget_workers()
        if self._error is not None and self._error in (error, error.__cause__):
            return
        self._error, self._found = error, (found := diagnose(error))
        self._event = self._log.event(
            "failure", why=": ".join(filter(None, (found.kind, found.message))),
            where=found.where, echo=lost_peer(error) or isinstance(error, PeerFailed),
            failed_step=self._log.status.step if step is None else step,
            failed_phase=self._log.status.place, memory=found.memory,
        )
        _report(self._event, error)

    def end(self, error: TrainerError) -> None:
        """Record an end whose message explains it; tell the launcher if the run may restart."""
        code = error.exit_code
        event = self._log.event("stop", why=str(error), exit_code=code, error=type(error).__name__,
                                echo=error.origin_rank not in (None, self._log.rank))
        if code == EXIT_FAILURE:
            _report(event, error)

    def advise(self) -> None:
        """Log the remedies for exhausted memory."""
        found, config = self._found, self._config
        if found is not None and found.memory and config is not None:
            self._log.error(explain_memory(found.memory, self._event["failed_phase"], config))

    def explain(self) -> tuple[int, str]:
        """Explain it on the console; returns the exit code and the last line."""
        log, error, found = self._log, self._error, self._found
        assert error is not None
        assert found is not None
        self._error = None
        if self._event["echo"]:  # the rank that caused it explains it
            message = (str(error) if isinstance(error, PeerFailed)
                       else f"lost a peer after step {log.status.step} ({log.status.phase})")
            log.warning(f"{message}; leaving")
            return EXIT_FAILURE, ""
        say(_stack(error))
        self.advise()
        if found.is_import:
            log.error("a failed import would fail again: the run is not restarted")
        log.error(last := failure_sentence(self._event))
        return EXIT_CONFIG if found.is_import else EXIT_FAILURE, last


def _report(event: dict[str, Any], error: BaseException) -> None:
    """Report a failure to `python -m launch`, and in torchrun's error file."""
    tell("failure", event)
    record_failure(failure_sentence(event), _stack(error), secondary=event["echo"])


def _stack(error: BaseException) -> str:
    return str(writable("".join(traceback.format_exception(error))))


MOST_CHARS = 400  # of a message; the traceback has the full text
_FRAME = re.compile(r'^[ |]*File "(.+?)", line (\d+), in (.+)$', re.MULTILINE)
_WORKER_DIED = re.compile(r"DataLoader worker .*(killed by signal|exited unexpectedly)")
_Frame = tuple[str, int | str, str]  # file, line, function

_SHORTAGE = re.compile(
    "allocate (shared )?memory|out of memory|unable to mmap|failed to map segment|"
    "no space left on device|disk quota exceeded|too many open files", re.IGNORECASE)

_GPU_MEMORY = re.compile(
    r"CUDA error: out of memory|_STATUS_ALLOC_FAILED|Cuda failure \d+ 'out of memory'")
"""GPU memory that runs out outside of torch's allocator: a context, cuBLAS, cuDNN, NCCL."""
_GPU = (
    ("device-side assert", "an index in a kernel is out of range, such as a label above the number "
     "of classes, or a token above the vocabulary; CUDA_LAUNCH_BLOCKING=1 shows its line"),
    ("illegal memory access|misaligned address|unspecified launch failure",
     "a kernel has failed before this line; CUDA_LAUNCH_BLOCKING=1 shows which"),
    ("uncorrectable ecc|uncorrectable nvlink|fallen off the bus|hardware stack error",
     "the GPU or its link is faulty (dmesg | grep Xid; nvidia-smi -q): leave it out"),
    ("re-initialize cuda in forked",
     "the data set uses the GPU, which loader processes can't; do that in loss(), or use "
     "--data.workers 0"),
)
"""Errors of a GPU, which the host meets later, at any line: a pattern, and the remedy."""
_LIMITS = (
    *_GPU,
    ("too many open files", "raise the limit of open files: ulimit -n 4096"),
    ("file too large", "raise the limit of a file's size: ulimit -f unlimited"),
    (r"\[errno 12\]|failed to map segment",
     "raise the limit of memory: ulimit -v, or the cgroup's"),
    ("can't start new thread|resource temporarily unavailable",
     "raise the limit of processes and threads: ulimit -u, or pids.max of the cgroup"),
    (r"\(shm\)|</torch_\d+|torch_shm_manager|out of shared memory\. Please",
     "/dev/shm is full: enlarge it (docker run --shm-size 8g; mount -o remount,size=8g /dev/shm), "
     "or use --data.workers 0"),
    ("disk quota exceeded", "make room, or raise the quota"),
    ("no space left on device", "make room on that disk"),
)
"""Errors of a GPU, and exhausted resources: a pattern of the message, and the remedy. Of torch's
RuntimeErrors and the dynamic linker's ImportErrors only the message tells."""

_NONDETERMINISTIC = re.compile(r"([\w ]+?) does not have a deterministic implementation")
_DETERMINISTIC = (
    ("nll_loss2d", "put the class axis last: cross_entropy(logits.movedim(1, -1).flatten(0, -2), "
                   "target.flatten()), as trainer.losses has it"),
    ("upsample_", "use torch.nn.Upsample(mode='nearest'), repeat_interleave or a transposed "
                  "convolution"),
    ("adaptive_avg_pool|adaptive_max_pool|adaptivemaxpool",
     "use mean() or amax() over the axes, or a pooling of a fixed kernel size"),
    ("max_pool3d|avg_pool3d|fractional_max_pool|max_unpool", "use a convolution with a stride"),
    ("reflection_pad|replication_pad", "pad with zeros, or by torch.cat of slices"),
    ("cumsum", "sum integers, or in float on the CPU"),
    ("kthvalue|median", "use sort()"),
    ("bincount|histc", "use new_zeros(bins).index_add_(0, places, weights)"),
    ("embedding_bag", "use mode='sum' or 'mean'"),
)
"""Operations of torch without a deterministic kernel on a GPU: a pattern, and what has one."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What an exception means."""

    kind: str  # name of its class
    message: str  # one line
    where: str | None  # `file:line in function`: the innermost line of user code, or of all
    is_import: bool  # an import failed: another attempt would fail in the same way
    memory: str | None  # what ran out of memory: `rank` or `worker`


def diagnose(error: BaseException) -> Diagnosis:
    """Diagnose an exception, also one that a loader worker has sent as text."""
    error = _first(error)
    text = text_of(error)
    kind, message, frames = type(error).__name__, text, _frames(error)
    kinds = {c.__name__ for e in _chain(error) for c in type(e).__mro__}
    if "Original Traceback (most recent call last)" in text:  # sent by a worker
        frames = _FRAME.findall(text.partition("\n\nThe above exception was")[0])
        starts = list(re.finditer(rf"^(?:[\w.]+\.)?{kind}: ", text, re.MULTILINE))
        message = text[starts[-1].end():] if starts else text.strip().splitlines()[-1]
    elif (cause := _chain(error)[-1]) is not error:
        # Also for an error in a loader worker, whose traceback comes as text.
        frames = _FRAME.findall(text_of(cause)) or _frames(cause) or frames
    kinds |= set(re.findall(r"\braised (\w+):", message[:MOST_CHARS]))  # by a data set
    readers = [getattr(sys.modules.get(name), "__file__", None)
               for name in ("torch.utils.data.dataloader", "trainer.data.workers")]
    handing_over = isinstance(error, ConnectionError | EOFError) and any(
        path in readers for path, _, _ in frames)
    if worker := handing_over or bool(_WORKER_DIED.search(text)):
        frames = []  # torch raises it at an arbitrary line of the rank
    exhausted = bool(kinds & {"MemoryError", "OutOfMemoryError"}) or (
        "DefaultCPUAllocator" in text and "memory" in text) or (
        isinstance(error, RuntimeError) and _GPU_MEMORY.search(text) is not None)
    memory = "rank" if exhausted else None
    if (exhausted and "DataLoader worker" in text) or (
            worker and (handing_over or "Killed" in text or "unexpectedly" in text)):
        memory = "worker"
    message, helps = " ".join(mask(message).split()), remedy(error)
    if len(message) > MOST_CHARS:
        message = message[:MOST_CHARS] + " …"
    return Diagnosis(
        kind=kind, message=message + (f"; {helps}" if helps else ""), where=_where(frames),
        is_import=not is_shortage(error) and bool(
            kinds & {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"}),
        memory=memory,
    )


def is_shortage(error: BaseException | None) -> bool:
    """Whether memory, disk space or open files are exhausted: another attempt may succeed."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_shortage, error.exceptions))
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError | RuntimeError | ImportError)
        and _SHORTAGE.search(text_of(error)) is not None)


def remedy(error: BaseException) -> str:
    """Remedy for an error at a system limit, or an operation that torch refuses because it is not
    deterministic; "" if none is known."""
    if isinstance(error, OSError | RuntimeError | ImportError):
        text = text_of(error)
        if found := _NONDETERMINISTIC.search(text):
            operation = found[1].split()[0]
            other = "".join(f"{helps}, or " for words, helps in _DETERMINISTIC
                            if re.search(words, operation, re.IGNORECASE))
            return (f"for exact restarts, {operation} must be replaced in the model or the loss: "
                    f"{other}continue with --numerics.deterministic off, without equal bits after "
                    "a restart")
        for words, helps in _LIMITS:
            if re.search(words, text, re.IGNORECASE):
                return helps
    return "" if error.__cause__ is None else remedy(error.__cause__)


def explain_memory(memory: str, phase: str, config: Any) -> str:
    """Explain exhausted memory of a `rank` or `worker`, with remedies in order."""
    batch, workers = config.batch, config.data.workers
    who, found = "out of memory", []
    if memory == "worker":
        who = "a loader worker died; the usual cause is too little memory"
        fewer = 1 if workers == "auto" else max(0, workers // 2)
        found.append(f"fewer loader workers, and less read ahead: --data.workers {fewer} "
                     "--data.prefetch 1")
    smaller = [d for d in range(1, batch.micro_size) if batch.global_size % d == 0]
    if smaller:
        found.append(f"a smaller micro-batch at the same global batch: --batch.micro-size "
                     f"{smaller[-1]} --accept batch.micro-size (schedule and sample order stay)")
    if memory == "rank":
        if config.precision.dtype in ("auto", "fp32"):
            found.append("mixed precision: --precision.dtype bf16")
        if (every := config.precision.recompute_every) != 1:
            found.append(f"activation checkpointing: --precision.recompute-every {every // 2 or 1} "
                         "(without blocks in an nn.Sequential or nn.ModuleList: torch.utils."
                         "checkpoint.checkpoint(part, x, use_reentrant=False) in the model)")
    return "\n".join([f"{who}, in phase {phase}, with micro-batches of {batch.micro_size}. "
                      "Remedies, in this order:",
                      *(f"  {number}. {words}" for number, words in enumerate(found, 1))])


def _first(error: BaseException) -> BaseException:
    """The first error of a GPU: every later call fails too, such as one in a `finally`."""
    while (before := error.__context__) is not None and all(
            "CUDA error" in text_of(one) for one in (error, before)):
        error = before
    return error


def _chain(error: BaseException) -> list[BaseException]:
    """An error of the trainer and its causes, down to user code's; of a group the first member."""
    inner = error.__cause__ if type(error).__module__.startswith("trainer.") else None
    if isinstance(error, BaseExceptionGroup):
        inner = error.exceptions[0]
    return [error, *([] if inner is None else _chain(inner))]


def is_foreign(error: BaseException) -> bool:
    """Whether user code raised it, so that its traceback explains more than the message."""
    return isinstance(error, SyntaxError) or any(
        foreignness(path) < 2 for path, _, _ in _frames(error))


def _frames(error: BaseException) -> list[_Frame]:
    """Frames of its traceback, outermost first, from the trainer's first frame on."""
    frames: list[_Frame] = [(frame.f_code.co_filename, line, frame.f_code.co_name)
                            for frame, line in traceback.walk_tb(error.__traceback__)]
    begin = next((i for i, f in enumerate(frames) if f[0].startswith(TRAINER_FOLDER)), 0)
    return frames[begin:]


def _where(frames: list[_Frame]) -> str | None:
    if not frames:
        return None
    nearest = min(foreignness(path) for path, _, _ in frames)
    path, line, function = next(f for f in reversed(frames) if foreignness(f[0]) == nearest)
    return f"{display_path(path)}:{line} in {function}"
