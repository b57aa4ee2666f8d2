"""Whether DDP has summed the gradients of a step, all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.data.sampler import Slot
from trainer.errors import ConfigError


def check_reduced(wrapped: nn.Module, slot: Slot, trained: Sequence[str]) -> None:
    """After a backward that sums gradients over ranks: that it has summed all of them.

    Raises:
        ConfigError: it has not: this rank's micro-batch doesn't use some parameter.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    try:
        wrapped.reducer._check_reducer_finalized()  # type: ignore[attr-defined]
    except RuntimeError as error:
        told = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        unused = [trained[int(i)].removeprefix("module.model.")
                  for i in told[1].split()] if told else ["some parameters"]
        raise ConfigError(
            f"--parallel.find-unused off: the loss of step {slot.step}, micro-batch {slot.number}, "
            f"doesn't depend on {', '.join(unused[:5])}{', …' * (len(unused) > 5)}, so the step is "
            "not made. Go on with --parallel.find-unused on.") from None
