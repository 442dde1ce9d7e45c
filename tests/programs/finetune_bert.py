"""Fine-tunes a BERT-like classifier, with the tokenizer in the checkpoint, and reads both back from it."""

import sys
from pathlib import Path

import torch
import transformers
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.metrics import CrossEntropy
from composer.models import HuggingFaceModel
from composer.optim import DecoupledSGDW, LinearWithWarmupScheduler

folder = Path(sys.argv[1])
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"the film was not good bad very a plot fine".split()]
(folder / "vocab.txt").write_text("\n".join(words))
tokenizer = transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt"), model_max_length=16)
config = transformers.BertConfig(
    vocab_size=len(words),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    num_labels=2,
    max_position_embeddings=32,
)
torch.manual_seed(2)
network = transformers.BertForSequenceClassification(config)
texts = [("the film was good", 1), ("the plot was bad", 0), ("a very good plot", 1), ("the film was not good", 0)] * 4
examples = [{**tokenizer(text, padding="max_length", truncation=True), "labels": label} for text, label in texts]
loader = DataLoader(examples, batch_size=4, collate_fn=transformers.default_data_collator)

model = HuggingFaceModel(
    network,
    tokenizer=tokenizer,
    metrics=[CrossEntropy(), MulticlassAccuracy(num_classes=2, average="micro")],
    use_logits=True,
)
trainer = Trainer(
    model=model,
    train_dataloader=loader,
    eval_dataloader=loader,
    max_duration="3ep",
    optimizers=DecoupledSGDW(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-6),
    schedulers=LinearWithWarmupScheduler(t_warmup="2ba", alpha_f=0.02),
    save_folder=str(folder / "checkpoints"),
    run_name="bert",
    device="cpu",
    seed=17,
    progress_bar=False,
)
trainer.fit()
trainer.close()
assert {"MulticlassAccuracy", "CrossEntropy"} <= trainer.state.eval_metrics["eval"].keys()

loaded, loaded_tokenizer = HuggingFaceModel.hf_from_composer_checkpoint(
    str(folder / "checkpoints" / "latest-rank0.pt"),
    model_instantiation_class=transformers.AutoModelForSequenceClassification,
)
assert isinstance(loaded, transformers.BertForSequenceClassification)
assert loaded_tokenizer("the film")["input_ids"] == tokenizer("the film")["input_ids"]
torch.save(network.state_dict(), folder / "weights.pt")
