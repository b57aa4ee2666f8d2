"""The model's buffers: copies at a step boundary, and agreement of the ranks on those that change.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from trainer.distributed import serialization
from trainer.distributed.replica_check import integers
from trainer.distributed.sync_batchnorm import SyncBatchNorm
from trainer.distributed.torch_private import buffer_slots
from trainer.distributed.waits import WaitsFor, waiting_for
from trainer.distributed.world import World
from trainer.errors import ConfigError, listed


@dataclass
class _Slot:
    """The place of a buffer in its module."""

    owner: dict[str, Any]
    key: str
    name: str
    is_persistent: bool
    original: Tensor | None
    """The tensor to which all other parts of a run refer."""
    kept: Tensor | None = None
    """Its copy at `keep`."""
    moves: bool = False
    """Whether it has changed in a forward, on some rank."""
    is_cache: bool = False
    """Whether each rank has its own: not persistent, and of a shape that changes; or sparse."""

    @property
    def current(self) -> Any:
        return self.owner.get(self.key)


class Buffers:
    """Copies of the model's buffers (BatchNorm statistics), updated at each step boundary.

    Any buffer may change in any step, and take another shape. Those that do are made equal on all
    ranks at the end of the step, where `agree` has found them in that step or an earlier one.
    Tensors that the forward assigns to buffers (`self.mean = …`) are copied back to the original
    ones, to which all other parts of a run refer.
    """

    def __init__(self, model: nn.Module, *, warn: Callable[[str], None] = lambda text: None
                 ) -> None:
        self._slots = [
            _Slot(owner, key, f"{path}.{key}".removeprefix("."), persistent, owner[key],
                  is_cache=owner[key] is not None and owner[key].layout != torch.strided)
            for path, module in model.named_modules()
            for owner, key, persistent in buffer_slots(module)]
        self._warn, self._was_reassigned = warn, False
        # Synchronised batch norms keep their statistics equal on all ranks.
        self._shared = {id(b) for m in model.modules()
                        if isinstance(m, SyncBatchNorm)
                        for b in m.buffers(recurse=False)}
        self._moved = set[str]()
        self._differed: dict[tuple[tuple[str, int], ...], Tensor] = {}
        self._live: list[Tensor] = []
        self._kept: list[Tensor] = []
        self.keep()

    def note_shared(self, tensors: Iterable[Tensor]) -> None:
        """Note buffers that the reduction keeps equal on all ranks."""
        self._shared |= {id(tensor) for tensor in tensors}

    def _allocate_copies(self) -> None:
        kept: dict[int, Tensor] = {}
        pairs = list[tuple[Tensor, Tensor]]()
        for slot in self._slots:
            if slot.is_cache or (live := slot.original) is None:
                slot.kept = None
                continue
            if id(live) not in kept:
                copy = slot.kept
                kept[id(live)] = copy if _fits(copy, live) else live.detach().clone()
                pairs.append((live, kept[id(live)]))
            slot.kept = kept[id(live)]
        self._live, self._kept = [live for live, _ in pairs], [copy for _, copy in pairs]

    @property
    def was_reassigned(self) -> bool:
        """Whether the forward assigns new tensors to buffers, or changes their shapes: within a
        step the originals are old."""
        return self._was_reassigned or any(
            s.current is not s.original or not _fits(s.original, s.kept)
            for s in self._slots if not s.is_cache)

    def keep(self) -> None:
        if not all(s.is_cache or _fits(s.original, s.kept) for s in self._slots):
            self._allocate_copies()
        if self._live:
            torch._foreach_copy_(self._kept, self._live)

    def put_back(self) -> None:
        """Restore the buffers to their values at `keep`."""
        for slot in self._slots:
            if slot.current is not slot.original and not slot.is_cache:
                self._was_reassigned = True
                slot.owner[slot.key] = slot.original
        for live, kept in self.pairs():
            if live.shape != kept.shape:
                self._was_reassigned = True
                _assign(live, kept)
        if self._live:
            torch._foreach_copy_(self._live, self._kept)

    def put_back_saved(self) -> None:
        """Restore the values at `keep` of the persistent buffers, as a checkpoint would."""
        others = [(s.original, s.original.detach().clone()) for s in self._slots
                  if not (s.is_persistent or s.is_cache or s.original is None)]
        self.put_back()
        for buffer, values in others:
            _assign(buffer, values)

    def restore_storage(self) -> None:
        """Copy tensors that the forward has assigned to buffers back to the original ones. Raises
        ConfigError if a persistent buffer has another dtype or device, or is no tensor."""
        for slot in self._slots:
            found, original = slot.current, slot.original
            if slot.is_cache or (found is original and _fits(found, slot.kept)):
                continue
            self._was_reassigned = True
            if not slot.is_persistent and not _fits(found, slot.kept):
                slot.original, slot.is_cache, slot.moves = found, True, False
            elif original is None or not _fits(found, slot.kept, shape=False):
                raise ConfigError(
                    f"--task: the model's forward changes its buffer {slot.name} from "
                    f"{_form(slot.kept)} to {_form(found)}; a restarted model has the buffer of "
                    "model() and could not load it. Register it in its final form, or with "
                    "persistent=False if it is only a cache.")
            elif found is not original:
                _assign(original, found.detach())
                slot.owner[slot.key] = original

    def changed(self) -> bool | Tensor:
        """Whether a forward since `keep` has changed a shape, or a buffer that was not known to
        change. On a GPU a tensor, for which nobody has waited."""
        changed, _, differs = self._compare()
        return changed if differs is None else differs.any()

    def _compare(self) -> tuple[bool, list[_Slot], Tensor | None]:
        """What `changed` tells as far as it needs no device; and the buffers on a device, with a
        vector of whether each of their bytes has changed, if nothing else has."""
        slots = [s for s in self._slots if not s.is_cache]
        if not all(_fits(s.current, s.kept) for s in slots):
            return True, [], None
        slots = [s for s in slots if s.kept is not None and not s.moves]
        if not all(_equal(s.current, s.kept) for s in slots if s.current.is_cpu):
            return True, [], None
        if not (slots := [s for s in slots if not s.current.is_cpu]):
            return False, [], None
        found = serialization.pack([s.current for s in slots])
        kept = serialization.pack([s.kept for s in slots if s.kept is not None])
        return False, slots, torch.ne(found, kept)

    def agree(self, world: World) -> bool:
        """Collective, where `changed` on any rank, after `restore_storage`. Note the buffers that
        have changed on some rank, and give all the shapes of the last rank. Returns whether that
        rank has made one non-finite, which `nonfinite` did not check yet."""
        slots = [s for s in self._slots if not s.is_cache and s.original is not None]
        moved = [s for s in slots if not s.moves and not _equal(s.original, s.kept)]
        everywhere = world.gather_json({
            "moved": [s.name for s in moved],
            "caches": [s.name for s in self._slots if s.is_cache],
            "shapes": {s.name: list(s.original.shape) for s in slots if s.original is not None},
            "nonfinite": any(map(_is_newly_nonfinite, moved))})
        on_any, caches = ({name for rank in everywhere for name in rank[key]}
                          for key in ("moved", "caches"))
        shapes: dict[str, list[int]] = everywhere[-1]["shapes"]
        for slot in slots:
            slot.is_cache = slot.name in caches
            slot.moves = (slot.moves or slot.name in on_any) and not slot.is_cache
            if slot.moves and slot.original is not None and (
                    list(slot.original.shape) != (shape := shapes[slot.name])):
                _assign(slot.original, slot.original.new_empty(shape))
        if lost := [s.name for s in moved if s.moves and not s.is_persistent]:
            self._warn(f"the model's forward changes {listed(lost)}, registered with "
                       "persistent=False, so no checkpoint holds it: unless it is only a cache, a "
                       "restart gives other bits")
        return bool(everywhere[-1]["nonfinite"])

    def broadcast(self, world: World) -> bool:
        """Collective. Make buffers equal on all ranks that each rank changes separately. The last
        rank is the source: it has an empty micro-batch only at the end of a stream's epoch. Returns
        whether there are such buffers; a GPU may not have received them yet."""
        if world.size == 1:
            return False
        moving = {id(s.original): s.original for s in self._slots
                  if s.moves and s.original is not None and id(s.original) not in self._shared}
        if moving:
            world.broadcast(list(moving.values()), world.size - 1)
        return bool(moving)

    def replicated(self) -> dict[str, Tensor]:
        """The buffers that must be equal on all ranks at a step boundary, by name."""
        return {s.name: s.original for s in self._slots if s.original is not None
                and not s.is_cache and (s.is_persistent or s.moves)}

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore buffers that change inside the context; `moved` tells which, of all contexts."""
        try:
            yield
        finally:
            changed, slots, differs = self._compare()
            if changed:
                self._moved |= {s.name for s in self._slots if not _equal(s.current, s.kept)}
            elif differs is not None:
                form = tuple((s.name, s.current.nbytes) for s in slots)
                before = self._differed.get(form)
                self._differed[form] = differs if before is None else before | differs
            if changed or differs is not None:  # on a device in any case: the host doesn't wait
                self.put_back()

    def moved(self) -> list[str]:
        """Names of the persistent buffers that have changed inside `preserved`, sorted. The host
        waits for the device."""
        for form, differs in self._differed.items():
            parts = differs.split([size for _, size in form])
            with waiting_for(WaitsFor.DEVICE):
                flags = torch.stack([part.any() for part in parts]).tolist()
            self._moved |= {name for (name, _), flag in zip(form, flags, strict=True) if flag}
        return sorted(s.name for s in self._slots if s.is_persistent and s.name in self._moved)

    def nonfinite(self, among: Container[Tensor] | None = None) -> Tensor | None:
        """NaN if a value of a changing buffer (in `among`) is not finite and was at `keep`,
        otherwise 0, on the buffers' device; None without such buffers."""
        found = [(slot.current.detach().flatten(), copy.flatten()) for slot in self._floating()
                 if (copy := slot.kept) is not None and (among is None or slot.original in among)]
        if not found:
            return None
        tensors, copies = zip(*found, strict=True)
        now = torch.cat(tensors)
        if now.is_cpu and math.isfinite(now.sum().item()):  # most often, and in a third of the time
            return now.new_zeros(())
        before = torch.cat(copies)
        return torch.where(before.isfinite(), now * 0, 0).sum()

    def nonfinite_names(self) -> list[str]:
        """Names of the changing buffers with such values."""
        return [slot.name for slot in self._floating() if _is_newly_nonfinite(slot)]

    def _floating(self) -> Iterator[_Slot]:
        return (slot for slot in self._slots if slot.moves and slot.kept is not None
                and slot.kept.is_floating_point() and _fits(slot.current, slot.kept))

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(buffer, copy) of each buffer."""
        return list(zip(self._live, self._kept, strict=True))


def take_shapes(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the model's buffers the shapes that they have in a state dict, to load that."""
    buffers = {id(buffer) for buffer in model.buffers()}
    for name, buffer in model.state_dict(keep_vars=True).items():
        if id(buffer) in buffers and name in tensors and buffer.shape != tensors[name].shape:
            _assign(buffer, buffer.new_empty(tensors[name].shape))


def _assign(buffer: Tensor, values: Tensor) -> None:
    """Give a buffer other values, of any shape."""
    if buffer.shape == values.shape:
        buffer.detach().copy_(values)
    else:
        buffer.data = values.clone()


def _equal(one: Any, other: Any) -> bool:
    """Whether two buffers have the same bits."""
    return one is other or (_fits(one, other) and torch.equal(integers(one), integers(other)))


def _fits(found: Any, other: Any, *, shape: bool = True) -> TypeGuard[Any]:
    """Whether two buffers have the same shape, dtype and device; or both are None."""
    if not isinstance(found, Tensor) or not isinstance(other, Tensor):
        return found is other
    return ((not shape or found.shape == other.shape) and found.dtype == other.dtype
            and found.device == other.device)


def _is_newly_nonfinite(slot: _Slot) -> bool:
    now, kept = slot.current, slot.kept
    return kept is not None and kept.is_floating_point() and _fits(now, kept) and bool(
        (kept.isfinite() & ~now.isfinite()).any())


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else type(value).__name__
