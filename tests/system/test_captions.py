"""Example that captions rows of digits: no leakage, unread padding, equal weights of tokens, and learning."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from datamodules.captions import DIGITS, END, PAD, START, VOCABULARY, Captions, Rows, collate, decode, encode
from models.captions import Captioner, picture
from tests.helpers.cli import run_model
from tests.helpers.tasks import bare_trainer


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Captioner(VOCABULARY, width=16).eval()


def make_rows(count=8, uncaptioned=0.0):
    """Return rows of noise without readable digits."""
    images = torch.rand(50, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    return Rows(TensorDataset(images, torch.arange(50) % 10), count, uncaptioned, seed=1)


def make_samples(*captions):
    """Return samples with these captions and one object per word; a sample without a caption has 4 objects."""
    generator = torch.Generator().manual_seed(0)
    lengths = [4 if caption is None else len(caption.split()) for caption in captions]
    return [
        {"name": str(i), "objects": torch.rand(length, 1, 28, 28, generator=generator), "caption": caption}
        for i, (caption, length) in enumerate(zip(captions, lengths, strict=True))
    ]


# -------------------------------------------------------------------- the data


def test_splits_share_no_images():
    data = Captions(rows=2000)
    data.setup("fit")
    found = [{image.numpy().tobytes() for image, _ in part.images} for part in (data.val, data.test)]
    found.append({image.numpy().tobytes() for image, _ in data.train.images.digits})
    assert [len(part) for part in found] == [500, 500, 4000]
    assert len(set.union(*found)) == 5000


def test_captions_read_their_row_and_some_are_missing():
    data = Captions(rows=1000, shift=0)
    data.setup("fit")
    for part in (data.train, data.val, data.test):
        for number, row in zip(range(20), part.rows, strict=False):
            labels = [int(part.images[i][1]) for i in row]
            assert part[number]["caption"] in (None, " ".join(DIGITS[label] for label in labels))
            assert torch.equal(part[number]["objects"], torch.stack([part.images[i][0] for i in row]))
    assert {len(row) for row in data.train.rows} == {2, 3, 4, 5, 6}
    assert sum(data.train[i]["caption"] is None for i in range(1000)) == pytest.approx(100, abs=30)
    assert all(part[i]["caption"] for part in (data.val, data.test) for i in range(500))


def test_a_batch_is_padded_and_says_where():
    given = make_samples("seven two zero", None, "one nine")
    batch = collate(given)
    assert batch["names"] == ["0", "1", "2"]
    assert batch["captions"] == ["seven two zero", None, "one nine"]
    assert batch["object_mask"].tolist() == [[False] * 3 + [True], [False] * 4, [False] * 2 + [True] * 2]
    for row, mask, sample in zip(batch["objects"], batch["object_mask"], given, strict=True):
        assert torch.equal(row[~mask], sample["objects"])
        assert not row[mask].any()
    seven, two, zero, one, nine = (VOCABULARY.index(word) for word in ("seven", "two", "zero", "one", "nine"))
    assert batch["tokens"].tolist() == [
        [START, seven, two, zero, END],
        [START, PAD, PAD, PAD, PAD],
        [START, one, nine, END, PAD],
    ]
    assert batch["weights"] == [4, 0, 3]


def test_words_and_numbers_are_translated_both_ways():
    assert decode(encode("seven two zero")[1:]) == "seven two zero"
    assert decode(torch.tensor([3, END, 4, END])) == "zero"
    assert decode(torch.tensor([3, 4])) == "zero one"


# -------------------------------------------------------------------- the model


def compute_logits(model, batch):
    return model.write(model.look(batch["objects"]), batch["object_mask"], batch["tokens"][:, :-1])


def test_padding_does_not_change_the_logits(model):
    given = make_samples("one two", "one two three four five six", "one two three")
    for sample, row in zip(given, compute_logits(model, collate(given)), strict=True):
        expected = compute_logits(model, collate([sample]))[0]
        torch.testing.assert_close(row[: len(expected)], expected)


def test_what_stands_in_the_padding_does_not_matter(model):
    batch = collate(make_samples("one two", "one two three four"))
    logits = compute_logits(model, batch)
    batch["objects"][batch["object_mask"]] = 0.7
    batch["tokens"][batch["tokens"] == PAD] = 5
    scribbled = compute_logits(model, batch)
    assert torch.equal(scribbled[0, :4], logits[0, :4])
    assert torch.equal(scribbled[1], logits[1])


def test_loss_is_token_mean_without_uncaptioned_rows(model):
    given = make_samples("one two", None, "three four five six")
    loss, weight = model.training_step(collate(given))
    parts = [model.training_step(collate([sample])) for sample in given]
    assert [part for _, part in parts] == [3, 0, 5]
    assert parts[1][0] == 0
    assert weight == 8
    torch.testing.assert_close(loss, sum(each * part for each, part in parts) / 8)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"), 16)


def train(folder, batch_size, **options):
    """Return the validation and the parameters after 2 epochs of 3 steps of 16 rows and one of 4.

    Four of ten rows have no caption.
    """
    torch.manual_seed(0)
    model = Captioner(VOCABULARY, width=16, dropout=0.0, warmup_steps=2)
    trainer = bare_trainer(folder, max_epochs=2, global_batch_size=16, precision="64-true", **options)
    data = make_rows(52, uncaptioned=0.4)
    trainer.fit(
        model,
        DataLoader(data, batch_size, shuffle=True, collate_fn=collate),
        DataLoader(data, batch_size + 1, collate_fn=collate),
    )
    metrics = {name: float(trainer.callback_metrics[name]) for name in ("val_loss", "val_right")}
    return metrics, {name: value.tolist() for name, value in model.state_dict().items()}


def train_on_two(folder):
    return train(folder, 4, strategy="ddp")


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, atol=1e-10, rtol=0, err_msg=name)


@pytest.mark.parametrize("batch_size", [8, 4])
def test_accumulated_batches_weigh_every_token_alike(tmp_path, alone, batch_size):
    assert_same(train(tmp_path, batch_size), alone)


def test_two_processes_weigh_every_token_alike(group, tmp_path, alone):
    for found in group(2).run(train_on_two, tmp_path):
        assert_same(found, alone)


def test_row_mean_would_train_differently(tmp_path, alone, monkeypatch):
    step = Captioner.training_step
    monkeypatch.setattr(Captioner, "training_step", lambda self, batch: step(self, batch)[0])
    _, parameters = train(tmp_path, 4)
    assert any(np.abs(np.subtract(parameters[name], value)).max() > 1e-4 for name, value in alone[1].items())


# -------------------------------------------------------------------- the config, through the command line


def scores(tmp_path, *arguments):
    run_model("test", "captions", tmp_path, "--ckpt_path=best", f"--output={tmp_path}/values.json", *arguments)
    return json.loads((tmp_path / "values.json").read_text())[0]


def test_short_training_reads_some_captions_and_writes_picture(tmp_path, capsys):
    """Two epochs are enough: 30 % of the captions are right in every word."""
    run_model("fit", "captions", tmp_path, "--trainer.max_epochs=2", "--data.rows=2000")
    found = scores(tmp_path)
    assert found["test_right"] >= 0.30

    capsys.readouterr()
    run_model("predict", "captions", tmp_path, "--ckpt_path=best", f"--output={tmp_path}/captions.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "captions.jsonl").read_text().splitlines()]
    data = Captions()
    data.setup("test")
    assert [row["caption"] for row in rows] == [data.test[i]["caption"] for i in range(500)]
    assert np.mean([row["predicted"] == row["caption"] for row in rows]) == pytest.approx(found["test_right"])
    sample = [f"predicted {row['predicted']!r}, caption {row['caption']!r}" for row in rows[:10]]
    shown = capsys.readouterr()
    assert shown.out.splitlines() == sample
    assert f"accuracy {found['test_right']:.1%}\n" in shown.err

    pictures = EventAccumulator(str(tmp_path / "captions/tensorboard")).Reload().Images("captions")
    assert [event.step for event in pictures] == [0, 63, 126]
    model = Captioner.load_from_checkpoint(tmp_path / "captions").eval()
    batch = next(iter(data.val_dataloader()))
    with torch.no_grad():
        expected = picture(batch["objects"][:8], model.describe(batch))
    shown = Image.open(io.BytesIO(pictures[-1].encoded_image_string)).convert("L")
    np.testing.assert_array_equal(np.asarray(shown), expected)


def test_picture_shows_rows_with_their_captions():
    batch = collate(make_samples("one two", "one two three four"))
    blank = picture(batch["objects"], ["", ""])
    written = picture(batch["objects"], ["", "one two three four", "not shown"])
    assert written.shape == (2 * 28, 4 * 28 + 230)
    for row, objects in enumerate(batch["objects"]):
        for column, image in enumerate(objects):
            shown = written[28 * row : 28 * row + 28, 28 * column : 28 * column + 28]
            np.testing.assert_array_equal(shown, (image[0] * 255).byte())
    assert np.array_equal(written[:28], blank[:28])
    assert (written[28:, 4 * 28 :] > blank[28:, 4 * 28 :]).any()


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_config_gets_nine_of_ten_captions_right(tmp_path):
    """Captions of the test split count if every word is right."""
    run_model("fit", "captions", tmp_path)
    assert scores(tmp_path)["test_right"] >= 0.90
