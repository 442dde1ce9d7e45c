"""Trains a GPT-like language model, saves it, and writes it as transformers reads it."""

import sys
from pathlib import Path

import tokenizers
import torch
import transformers
from torch.utils.data import DataLoader

from composer import Trainer
from composer.algorithms import GradientClipping
from composer.metrics import LanguageCrossEntropy, LanguagePerplexity
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint

folder = Path(sys.argv[1])
words = {word: i for i, word in enumerate(["<pad>", "<eos>", *"a b c d e f g h".split()])}
backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
config = transformers.GPT2Config(
    vocab_size=len(words), n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
torch.manual_seed(2)
network = transformers.GPT2LMHeadModel(config)
examples = [
    tokenizer(f"{'a b c d e f g h ' * 2}", max_length=12, truncation=True, return_token_type_ids=False)
    for _ in range(16)
]
collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader(examples, batch_size=8, collate_fn=collate)

model = HuggingFaceModel(
    network, tokenizer=tokenizer, metrics=[LanguageCrossEntropy(), LanguagePerplexity()], use_logits=True
)
trainer = Trainer(
    model=model,
    train_dataloader=loader,
    eval_dataloader=loader,
    max_duration="6ba",
    optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
    algorithms=GradientClipping(clipping_type="norm", clipping_threshold=1.0),
    device_train_microbatch_size=4,
    save_folder=str(folder / "checkpoints"),
    save_interval="3ba",
    run_name="gpt",
    device="cpu",
    seed=17,
    progress_bar=False,
)
trainer.fit()
trainer.close()
assert float(trainer.state.eval_metrics["eval"]["LanguagePerplexity"].compute()) > 1

write_huggingface_pretrained_from_composer_checkpoint(
    str(folder / "checkpoints" / "latest-rank0.pt"), str(folder / "pretrained")
)
weights = torch.load(folder / "pretrained" / "pytorch_model.bin", weights_only=True)
assert all(torch.equal(weights[name], value) for name, value in network.state_dict().items() if name in weights)
assert transformers.AutoTokenizer.from_pretrained(folder / "pretrained").pad_token == "<pad>"
torch.save(network.state_dict(), folder / "weights.pt")
