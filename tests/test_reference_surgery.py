"""A checkpoint in the established layout brings back the algorithms that its model cannot be loaded without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composer import Trainer
from composer.algorithms import BlurPool, SqueezeExcite
from composer.functional import apply_blurpool, apply_squeeze_excite
from composer.testing import ConvModel

BLURPOOL = "BlurPool(replace_convs=True,replace_maxpools=True,blur_first=True,min_channels=0)"
SQUEEZE = "SqueezeExcite(latent_channels=2.0,min_channels=4)"
MIXUP = "MixUp(alpha=0.2,interpolate_loss=False,input_key=0,target_key=1)"


def changed() -> torch.nn.Module:
    torch.manual_seed(7)
    model = ConvModel()
    apply_squeeze_excite(model, latent_channels=2.0, min_channels=4)
    apply_blurpool(model, replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=0)
    return model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with that model; what an algorithm is, it says in text."""
    names = [name for name, _ in changed().named_parameters()]
    optimizer = {"state": {}, "param_groups": [{"lr": 0.5, "params": names}]}
    algorithms = {"SqueezeExcite": SQUEEZE, "BlurPool": BLURPOOL, "MixUp": MIXUP}
    content = {
        "state": {
            "model": changed().state_dict(),
            "algorithms": [(name, {"repr": text}) for name, text in algorithms.items()],
            "optimizers": {"SGD": optimizer},
            "timestamp": {"Timestamp": {"epoch": 1, "batch": 3, "batch_in_epoch": 0, "sample": 12}},
            "rank_zero_seed": 3,
            "run_name": "established",
        }
    }
    torch.save(content, tmp_path / "ep1.pt")
    return tmp_path / "ep1.pt"


def trainer(path: Path, **kwargs: Any) -> Trainer:
    torch.manual_seed(8)
    model = ConvModel()
    made = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="2ep",
        device="cpu",
        progress_bar=False,
        load_path=str(path),
        **kwargs,
    )
    made.close()
    return made


@pytest.mark.filterwarnings("ignore:Automatically adding required_on_load algorithm")
def test_model_gets_the_layers_and_their_weights(path: Path) -> None:
    with pytest.warns(UserWarning, match="Automatically adding required_on_load algorithm `BlurPool"):
        made = trainer(path)
    weights = changed().state_dict()

    assert sorted(type(one).__name__ for one in made.state.algorithms) == ["BlurPool", "SqueezeExcite"]
    assert made.state.model.state_dict().keys() == weights.keys()
    for name, value in made.state.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert made.state.optimizers[0].param_groups[0]["lr"] == 0.5
    assert made.state.timestamp.batch == 3


def test_algorithms_that_the_run_has_are_not_added_again(path: Path) -> None:
    own = [SqueezeExcite(latent_channels=2.0, min_channels=4), BlurPool(min_channels=0)]
    made = trainer(path, algorithms=own)

    assert list(made.state.algorithms) == own


def test_excluded_algorithms_leave_a_model_that_does_not_fit(path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):
        trainer(path, load_weights_only=True, load_exclude_algorithms=["BlurPool", "SqueezeExcite"])


def test_text_of_an_algorithm_is_never_run(path: Path, tmp_path: Path) -> None:
    harm = tmp_path / "harm"
    content = torch.load(path, weights_only=True)
    code = f"BlurPool(min_channels=__import__('pathlib').Path({str(harm)!r}).touch())"
    content["state"]["algorithms"] = [("BlurPool", {"repr": code})]
    torch.save(content, path)
    with (
        pytest.warns(UserWarning, match="`BlurPool`, with which the checkpoint was saved, could not be rebuilt"),
        pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"),
    ):
        trainer(path, load_weights_only=True)

    assert not harm.exists()
