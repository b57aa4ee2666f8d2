"""The model: two convolutions over time."""

from torch import Tensor, nn

from wave_forms.data import FORMS


class Net(nn.Module):
    """Waves Nx1x64 → logits Nx4."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, width, 7, stride=2, padding=3), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 7, stride=2, padding=3), nn.ReLU())
        self.head = nn.Linear(width, len(FORMS))

    def forward(self, waves: Tensor) -> Tensor:
        return self.head(self.body(waves).amax(2))
