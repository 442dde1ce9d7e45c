"""Profiles a run: traces of events, algorithms and callbacks, and of torch."""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import LabelSmoothing
from composer.models import ComposerClassifier
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule

folder = Path(sys.argv[1])
drawn = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 8, generator=drawn), torch.randint(0, 4, (64,), generator=drawn))
torch.manual_seed(2)
network = torch.nn.Linear(8, 4)
model = ComposerClassifier(network, num_classes=4)
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(data, batch_size=8),
    max_duration="1ep",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    algorithms=LabelSmoothing(0.1),
    profiler=Profiler(
        trace_handlers=[JSONTraceHandler(folder=str(folder / "traces"), overwrite=True)],
        schedule=cyclic_schedule(wait=1, warmup=1, active=2, repeat=1),
        torch_prof_folder=str(folder / "torch_traces"),
        torch_prof_overwrite=True,
        sys_prof_cpu=False,
    ),
    device="cpu",
    seed=3,
    progress_bar=False,
)
trainer.fit()
trainer.close()

merged = json.loads((folder / "traces" / "merged_trace.json").read_text())
names = {event.get("name", "") for event in (merged if isinstance(merged, list) else merged["traceEvents"])}
assert any("batch_start" in name or "BATCH_START" in name for name in names), sorted(names)[:20]
assert list((folder / "torch_traces").rglob("*.json*"))
torch.save(network.state_dict(), folder / "weights.pt")
