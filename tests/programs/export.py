"""Exports a trained model for inference: TorchScript and ONNX, at the end of the run and by hand."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.callbacks import ExportForInferenceCallback
from composer.models import ComposerClassifier
from composer.utils import export_for_inference

folder = Path(sys.argv[1])
drawn = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(32, 8, generator=drawn), torch.randint(0, 4, (32,), generator=drawn))
torch.manual_seed(2)
network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
model = ComposerClassifier(network, num_classes=4)
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(data, batch_size=8),
    max_duration="2ep",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    callbacks=ExportForInferenceCallback(save_format="torchscript", save_path=str(folder / "callback.pt")),
    device="cpu",
    seed=3,
    progress_bar=False,
)
trainer.fit()
inputs = torch.randn(8, 8, generator=drawn)
batch = (inputs, torch.zeros(8, dtype=torch.int64))
model.eval()
with torch.no_grad():
    expected = model(batch)

for name in ("callback.pt", "function.pt"):
    if name == "function.pt":
        export_for_inference(model=model, save_format="torchscript", save_path=str(folder / name))
    torch.testing.assert_close(torch.jit.load(str(folder / name))(batch), expected)

try:
    import onnxruntime
except ImportError:
    print("onnxruntime is not installed: ONNX is not exported")
else:
    trainer.export_for_inference(
        save_format="onnx", save_path=str(folder / "model.onnx"), sample_input=batch, input_names=["input"]
    )
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    (output,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), expected, atol=1e-5, rtol=1e-4)
trainer.close()
torch.save(network.state_dict(), folder / "weights.pt")
