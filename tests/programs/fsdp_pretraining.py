"""Pre-trains a model that is sharded over ranks, with sharded checkpoints in a remote store, and resumes from them.

To be launched with `composer -n 2`; `sys.argv[2]` is the URI of a folder in the store.
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from composer import Callback, ComposerModel, Trainer
from composer.utils import dist

folder, store = Path(sys.argv[1]), sys.argv[2]
VOCABULARY, LENGTH = 32, 8


class Block(torch.nn.Module):
    _fsdp_wrap = True

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, hidden, mask):
        return self.layer(hidden, src_mask=mask, is_causal=True)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(16, VOCABULARY)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(hidden)


class LanguageModel(ComposerModel):
    def __init__(self):
        super().__init__()
        self.network = Network()

    def forward(self, batch):
        return self.network(batch["input_ids"])

    def loss(self, outputs, batch):
        targets = batch["input_ids"][:, 1:]
        return torch.nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), targets.flatten())


drawn = torch.Generator().manual_seed(1)
tokens = torch.randint(0, VOCABULARY, (32, LENGTH), generator=drawn)
data = [{"input_ids": row} for row in tokens]


class Start(Callback):
    batch = None

    def fit_start(self, state, logger):
        Start.batch = state.timestamp.batch.value


def train(duration, **arguments):
    torch.manual_seed(2)
    model = LanguageModel()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, sampler=dist.get_sampler(data, shuffle=True)),
        max_duration=duration,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        callbacks=[Start()],
        parallelism_config={
            "fsdp": {"sharding_strategy": "FULL_SHARD", "state_dict_type": "sharded", "mixed_precision": "PURE"}
        },
        device="cpu",
        precision="fp32",
        seed=3,
        progress_bar=False,
        run_name="pretraining",
        **arguments,
    )
    trainer.fit()
    trainer.close()
    return trainer


if __name__ == "__main__":  # uploading processes import this file
    saved = {"save_folder": store, "save_interval": "2ba", "save_filename": "ba{batch}"}
    train("4ba", **saved)
    resumed = train("8ba", autoresume=True, **saved)
    assert Start.batch == 4, Start.batch
    whole = train("8ba")
    assert resumed.state.timestamp.batch == "8ba"
    for (name, one), (_, other) in zip(
        resumed.state.model.state_dict().items(), whole.state.model.state_dict().items(), strict=True
    ):
        one, other = (value.full_tensor() if hasattr(value, "full_tensor") else value for value in (one, other))
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=name)
    (folder / f"done{dist.get_global_rank()}").touch()
