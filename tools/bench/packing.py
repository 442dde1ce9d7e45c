"""Training a small GPT-2 on documents of many lengths: rows of several documents against padded ones."""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from composer import Trainer
from composer.algorithms.sequence_packing import SequencePacking, pack_sequences
from composer.models import HuggingFaceModel
from tools.bench._measure import interleaved, machine, spread, timed

_VOCABULARY, _LENGTH, _BATCH = 512, 256, 32


def _documents(count: int) -> list[torch.Tensor]:
    """Random tokens. The logarithms of the lengths are normal: median 48 tokens, at most 256."""
    generator = torch.Generator().manual_seed(0)
    lengths = (48 * torch.randn(count, generator=generator).exp()).clamp(2, _LENGTH).int()
    return [torch.randint(_VOCABULARY, (int(length),), generator=generator) for length in lengths]


def _padded(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([*map(torch.ones_like, documents)], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _trainer(how: str, documents: list[torch.Tensor]) -> Trainer:
    logging.getLogger("composer.models.huggingface").setLevel(logging.ERROR)  # it misses the tokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": _LENGTH}
    config = GPT2Config(vocab_size=_VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes)
    model = HuggingFaceModel(GPT2LMHeadModel(config))
    dataset: Any = documents
    return Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, batch_size=_BATCH, collate_fn=_padded, drop_last=True),
        optimizers=torch.optim.AdamW(model.parameters()),
        algorithms=SequencePacking(_LENGTH) if how == "packed" else None,
        max_duration="1ep",
        progress_bar=False,
        device="cpu",
    )


def _epoch(how: str, documents: list[torch.Tensor]) -> Callable[[], float]:
    """Real tokens per second of an epoch."""
    tokens = sum(map(len, documents[: len(documents) // _BATCH * _BATCH]))

    def run() -> float:
        trainer = _trainer(how, documents)
        seconds = timed(trainer.fit)
        trainer.close()
        return tokens / seconds

    return run


def _peak(how: str, batches: int) -> float:
    """MB of memory that training adds at most, in a new process; on Linux."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_train_once, (how, batches))


def _train_once(how: str, batches: int) -> float:
    torch.set_num_threads(1)
    trainer = _trainer(how, _documents(batches * _BATCH))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = _memory("VmRSS")
    trainer.fit()
    trainer.close()
    return (_memory("VmHWM") - before) / 1e3


def _memory(name: str) -> int:
    """Return kB of memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def main(arguments: list[str]) -> None:
    """Print tokens of documents per second, and memory."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- packing", description=__doc__)
    parser.add_argument("--batches", type=int, default=4, help="batches per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    documents = _documents(options.batches * _BATCH)
    ways = ("packed", "padded")
    results = interleaved({how: _epoch(how, documents) for how in ways}, options.rounds)
    peaks = {how: _peak(how, options.batches) for how in ways}
    batches = [documents[start : start + _BATCH] for start in range(0, len(documents), _BATCH)]
    fill = statistics.mean(float(pack_sequences(each, _LENGTH)["attention_mask"].float().mean()) for each in batches)
    full = statistics.mean(float(_padded(each)["attention_mask"].float().mean()) for each in batches)
    packing = 1e3 * statistics.median(timed(partial(pack_sequences, _padded(batches[0]), _LENGTH)) for _ in range(50))
    print(f"{machine()}; batches of {_BATCH} documents, {options.batches} of them, {options.rounds} interleaved rounds")
    print(f"tokens that are not padding: {fill:.0%} packed, {full:.0%} padded to the longest of each batch")
    print(f"packing a batch: {packing:.2f} ms")
    print(f"{'':24}{'tokens/s':>10}{'min-max':>16}{'ratio':>7}{'peak MB':>9}")
    packed = statistics.median(results["packed"])
    for how, values in results.items():
        median = statistics.median(values)
        ratio = packed / median
        print(f"{how:24}{median:10.0f}{spread(values, 0):>16}{ratio:7.2f}{peaks[how]:9.0f}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
