"""Defines methods: one that changes the batch, one that changes gradients, one that changes the model."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Algorithm, Event, Trainer
from composer.models import ComposerClassifier
from composer.utils import module_surgery

folder = Path(sys.argv[1])


class NoisyInputs(Algorithm):
    def __init__(self, scale):
        self.scale = scale
        self.generator = torch.Generator().manual_seed(5)

    def match(self, event, state):
        return event == Event.AFTER_DATALOADER

    def apply(self, event, state, logger):
        inputs, targets = state.batch
        state.batch = (inputs + self.scale * torch.randn(inputs.shape, generator=self.generator), targets)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


class GradientCentralization(Algorithm):
    def match(self, event, state):
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event, state, logger):
        for parameter in state.model.parameters():
            if parameter.grad is not None and parameter.grad.dim() > 1:
                parameter.grad -= parameter.grad.mean(dim=1, keepdim=True)
        logger.log_metrics({"centralized": 1.0})
        return 1


class ReLUToSiLU(Algorithm):
    def match(self, event, state):
        return event == Event.INIT

    def apply(self, event, state, logger):
        replaced = module_surgery.replace_module_classes(
            state.model, {torch.nn.ReLU: lambda module, index: torch.nn.SiLU()}, optimizers=state.optimizers
        )
        logger.log_hyperparameters({"replaced": len(replaced)})


drawn = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(32, 8, generator=drawn), torch.randint(0, 4, (32,), generator=drawn))
torch.manual_seed(2)
network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
model = ComposerClassifier(network, num_classes=4)
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(data, batch_size=8),
    max_duration="2ep",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    algorithms=[NoisyInputs(0.1), GradientCentralization(), ReLUToSiLU()],
    device="cpu",
    seed=3,
    progress_bar=False,
)
trainer.fit()
trainer.close()

assert isinstance(network[1], torch.nn.SiLU)
torch.save(network.state_dict(), folder / "weights.pt")
