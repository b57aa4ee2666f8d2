"""The loss: a sum over samples, never a mean."""

from torch import Tensor
from torch.nn import functional


def focal(logits: Tensor, forms: Tensor, gamma: float) -> Tensor:
    """Focal loss, which gives easy samples less weight, summed over the batch (Lin et al. 2017,
    https://arxiv.org/abs/1708.02002)."""
    losses = functional.cross_entropy(logits, forms, reduction="none")
    return ((1 - (-losses).exp()) ** gamma * losses).sum()
