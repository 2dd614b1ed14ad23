"""The source text of Python's own standard library, as bytes, in an ordinary LightningDataModule.

It is on every machine that can run this, so nothing is downloaded and nothing is stored.
"""

import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Not the library itself: what was installed into it, and its tests, which are long tables.
SKIPPED_FOLDERS = frozenset({"dist-packages", "idle_test", "site-packages", "test", "tests"})


def source_files(root: Path) -> list[Path]:
    """Python files below `root`, in an order that depends on their names alone but mixes the folders."""

    def key(path: Path) -> tuple[int, str]:
        name = path.relative_to(root).as_posix()
        return zlib.crc32(name.encode()), name

    files = (path for path in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))
    return sorted(files, key=key)


def read_bytes(files: Iterable[Path], max_bytes: int) -> Tensor:
    """The files one after the other, cut off at `max_bytes`, as ``uint8 [length]``."""
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Neighbouring windows of a text: ``(tokens, targets)``, both ``int64 [context]``, targets one byte later."""

    def __init__(self, text: Tensor, context: int) -> None:
        if len(text) <= context:
            raise ValueError(
                f"A text must be longer than `context` ({context} bytes), got {len(text)}. "
                "Raise `max_bytes`, or lower `context`."
            )
        self.text = text
        self.context = context

    def __len__(self) -> int:
        """Number of whole windows."""
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Window `index`."""
        begin = index * self.context
        window = self.text[begin : begin + self.context + 1].long()
        return window[:-1], window[1:]


class PythonSource(L.LightningDataModule):
    """Training and validation windows of Python source; one file in twenty is kept for validation.

    Args:
        context: Bytes in a window.
        batch_size: Windows in a batch.
        max_bytes: Most bytes to train on; validation takes a tenth of it at most.
        seed: Decides the order of the training windows, whatever else draws random numbers.
        root: Folder to read; the standard library of the running Python by default.
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 32,
        max_bytes: int = 8_000_000,
        seed: int = 0,
        root: Path | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.seed = seed
        self.root = root or Path(sysconfig.get_paths()["stdlib"])

    def setup(self, stage: str) -> None:
        """Read the files."""
        files = source_files(self.root)
        self.train_windows = Windows(
            read_bytes((f for i, f in enumerate(files) if i % 20), self.max_bytes), self.context
        )
        self.val_windows = Windows(read_bytes(files[::20], self.max_bytes // 10), self.context)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffled by a generator of its own, so that every run with this seed sees the same batches."""
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_windows, self.batch_size, shuffle=True, generator=order, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """In the order of the text."""
        return DataLoader(self.val_windows, self.batch_size)
