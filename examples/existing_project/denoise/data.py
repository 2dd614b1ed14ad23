"""Pairs of a noisy and a clean patch, from the two photographs that come with scikit-learn."""

import lightning as L
import torch
from sklearn.datasets import load_sample_images  # type: ignore[import-untyped]  # it has no types
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

Pair = tuple[Tensor, Tensor]


class RandomPatches(Dataset[Pair]):
    """Cut out at random, flipped and turned at random, with fresh noise every time.

    Args:
        images: ``[3, height, width]`` each, from 0 to 1.
        num_patches: How many make an epoch.
        size: Pixels on a side.
        noise: Its standard deviation.
    """

    def __init__(self, images: list[Tensor], num_patches: int, size: int, noise: float) -> None:
        self.images = images
        self.num_patches = num_patches
        self.size = size
        self.noise = noise

    def __len__(self) -> int:
        """Patches in an epoch."""
        return self.num_patches

    def __getitem__(self, index: int) -> Pair:
        """A patch; another one at each call."""
        image = self.images[index % len(self.images)]
        top = int(torch.randint(image.shape[1] - self.size + 1, ()))
        left = int(torch.randint(image.shape[2] - self.size + 1, ()))
        clean = image[:, top : top + self.size, left : left + self.size]
        if torch.rand(()) < 0.5:
            clean = clean.flip(2)
        clean = clean.rot90(int(torch.randint(4, ())), (1, 2)).contiguous()
        return clean + self.noise * torch.randn_like(clean), clean


class Photos(L.LightningDataModule):
    """Trains on the left three quarters of each photograph; the rest is for validation and test.

    Args:
        batch_size: Patches in a batch.
        num_patches: Training patches in an epoch.
        size: Pixels on a side of a patch.
        noise: Standard deviation of the noise; pixels are from 0 to 1.
        num_workers: Processes that cut patches.
    """

    def __init__(
        self,
        batch_size: int = 16,
        num_patches: int = 512,
        size: int = 32,
        noise: float = 0.1,
        num_workers: int = 2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.num_patches = num_patches
        self.size = size
        self.noise = noise
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Load, split, and make the noise of the patches that models are judged by."""
        photos = [torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images]
        self.train_set = RandomPatches([photo[:, :, :480] for photo in photos], self.num_patches, self.size, self.noise)
        held_back = torch.cat([self._grid(photo[:, :, 480:]) for photo in photos])
        noise = self.noise * torch.randn(held_back.shape, generator=torch.Generator().manual_seed(0))
        noisy = held_back + noise
        self.val_set = TensorDataset(noisy[::2], held_back[::2])
        self.test_set = TensorDataset(noisy[1::2], held_back[1::2])

    def train_dataloader(self) -> DataLoader[Pair]:
        """Random patches, cut by workers."""
        return DataLoader(
            self.train_set,
            self.batch_size,
            shuffle=True,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Every other patch of what was held back."""
        return DataLoader(self.val_set, self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The patches between those."""
        return DataLoader(self.test_set, self.batch_size)

    def _grid(self, image: Tensor) -> Tensor:
        """All whole patches side by side, ``[patches, 3, size, size]``."""
        patches = image.unfold(1, self.size, self.size).unfold(2, self.size, self.size)
        return patches.permute(1, 2, 0, 3, 4).flatten(0, 1)
