"""Every pair of features: equal to the hand-written loop, or refused by name."""

import pytest
import torch

from lumen.errors import LumenError
from tests.helpers.feature_pairs import REFUSED, Features, cover_pairs, list_combinations, train, train_by_hand

#: Largest difference from the loop in float64. A skipped update of fp16 is the largest.
TOLERANCE = {"64-true": 1e-12, "32-true": 1e-5, "bf16-mixed": 0.05, "16-mixed": 0.2, "bf16-true": 0.1}


def run(group, folder, features):
    if features.strategy == "auto":
        return train(folder, features)
    ranks = group(2).run(train, folder, features, limit_s=180)
    assert ranks[0] == ranks[1]
    return ranks[0]


def check(group, folder, features):
    """Compare a combination with the hand-written loop, and a killed run bitwise with an uninterrupted run."""
    tolerance = TOLERANCE[features.precision]
    parameters, val_loss = run(group, folder / "run", features)
    expected, expected_loss = train_by_hand(features)
    for ours, by_hand in zip(parameters, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(by_hand), rtol=0, atol=tolerance)
    assert val_loss == pytest.approx(expected_loss, abs=tolerance)
    if features.end == "killed":
        assert (parameters, val_loss) == run(group, folder / "whole", Features(**features | {"end": "plain"}))


@pytest.mark.parametrize("features", cover_pairs(), ids=lambda each: each.label)
def test_features_combine_as_by_hand(group, tmp_path, features):
    check(group, tmp_path, features)


def refuse(folder, features, message):
    with pytest.raises((LumenError, torch.OutOfMemoryError), match=message):
        train(folder, features)


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: Features(**dict(pair)).label)
def test_refused_pairs_are_named(group, tmp_path, pair):
    features = Features(**dict(pair))
    if features.strategy == "auto":
        refuse(tmp_path, features, REFUSED[pair])
    else:
        group(2).run(refuse, tmp_path, features, REFUSED[pair])


@pytest.mark.torture
@pytest.mark.time_limit(1_000_000)
def test_every_combination_trains_as_by_hand(group, tmp_path):
    for number, features in enumerate(list_combinations()):
        check(group, tmp_path / str(number), features)
