"""Check that DDP has reduced all gradients of a step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.data.sampler import Slot


def check_reduced(wrapped: nn.Module, slot: Slot, trained: Sequence[str]) -> None:
    """Check, after a backward that all-reduces, that DDP has reduced every gradient.

    Raises:
        ConfigError: this rank's micro-batch does not use some parameter.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    try:
        wrapped.reducer._check_reducer_finalized()  # type: ignore[attr-defined]
    except RuntimeError as error:
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        unused = [trained[int(i)].removeprefix("module.model.")
                  for i in match[1].split()] if match else ["some parameters"]
        raise ConfigError(
            f"--parallel.find-unused off: the loss of step {slot.step}, micro-batch {slot.number}, "
            f"does not depend on {', '.join(unused[:5])}{', …' * (len(unused) > 5)}, so DDP cannot "
            "finish the step. Continue with --parallel.find-unused on.") from None
