"""The functions, then the class. Symbols: N documents, S tokens in the longest; R rows of L tokens."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from composer.core import (
    CHANGES_LENGTH,
    PACKS_SEQUENCES,
    PRUNES_BATCH,
    RESHAPES_SEQUENCES,
    TRANSFORMS_BATCH,
    Algorithm,
    Event,
    Placement,
    Precision,
)
from composer.models.base import ComposerModel
from composer.utils import check_flags, check_integers, model_eval_mode, plain_number, unwrapped_model

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from composer.core import State
    from composer.loggers import Logger

_IGNORED = -100  # the label of a token without loss, in torch and transformers
_CHECKED = 64  # tokens of a document in the check of a model, at most
_PADDING = -1  # the document index of padding


def pack_sequences(
    documents: Mapping[str, Any] | Sequence[Any],
    length: int,
    *,
    causal: bool = True,
    split_long: bool = False,
    pad_token_id: int = 0,
    first_position: int = 0,
) -> dict[str, Any]:
    """Pack documents into rows of equal length. The result depends only on the documents.

    Longest first, each document goes into the fullest row that has room for it (best-fit decreasing), or into a new row
    if none has. Rows, and documents in a row, are then put into the order of the documents, which stay whole. Any
    two rows together have more than L tokens, so at most one is less than half full.

    Args:
        documents: A batch, with `input_ids` of shape (N, S) and an `attention_mask` of that shape, which is 0 at
            padding; without it there is no padding. Or a sequence of documents, as a `collate_fn` gets them: each a
            sequence of token ids, or a mapping with `input_ids` and other values for each token.
        length: The length L of the rows, at least 2.
        causal: The labels are the next tokens: of each document, the first token has no loss. Without `labels`, they
            are the tokens themselves. If False, labels are packed as they are.
        split_long: Split documents of more than L tokens into documents of L tokens and a rest.
        pad_token_id: The token in the rest of a row.
        first_position: The position of the first token of a document: 2 for RoBERTa and models like it, else 0.

    Returns:
        A batch of R rows with

        - `input_ids` and other entries with a value for each token, shape (R, L, ...), in their dtypes;
        - `labels`, shape (R, L): -100 at padding, and at the first token of each document if `causal`;
        - `attention_mask`, shape (R, L), int64: 1, or 0 at padding;
        - `position_ids`, shape (R, L), int64: they restart in each document;
        - `document_ids`, shape (R, L), int64: the number of the document in the batch, or -1 at padding;
        - entries with one value for each document, unchanged, which requires a row for each document;
        - numbers, strings and other entries without values for each document, unchanged.

    Raises:
        TypeError: `documents` is neither a batch nor a sequence.
        ValueError: There are no tokens, a document is longer than L and `split_long` is False, an entry has one value
            for each document and documents share rows, or `input_ids` is missing or has another shape.

    Example:
        >>> batch = pack_sequences([[5, 6, 7, 8], [9, 3], [2]], length=5)
        >>> batch["input_ids"].tolist(), batch["document_ids"].tolist()
        ([[5, 6, 7, 8, 2], [9, 3, 0, 0, 0]], [[0, 0, 0, 0, 2], [1, 1, -1, -1, -1]])
        >>> batch["labels"].tolist()
        [[-100, 6, 7, 8, -100], [-100, 3, -100, -100, -100]]
        >>> batch["position_ids"].tolist()
        [[0, 1, 2, 3, 0], [0, 1, 0, 0, 0]]

    Source: Krell, Kosec, Perez and Fitzgibbon, "Efficient Sequence Packing without Cross-contamination", arXiv:
        2107.02027; Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830, section 3 (best-fit
        decreasing; long documents are split).
    Differs: rows are found for the documents of a batch, not for those of a dataset.
    """
    _check_arguments(length, split_long, pad_token_id, first_position)
    check_flags(causal=causal)
    batch = _as_batch(documents)
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    lengths = _split_lengths(mask.sum(1).tolist(), length, split_long)
    rows = _assign_rows(lengths, length)
    shares = len(rows) < len(ids) or len(lengths) != len(ids)
    place = _Places(rows, lengths, length, ids.device)

    packed: dict[str, Any] = {}
    for key, value in batch.items():
        if key in ("attention_mask", "position_ids", "document_ids"):
            continue
        if isinstance(value, torch.Tensor) and value.shape[:2] == ids.shape:
            filler = {"input_ids": pad_token_id, "labels": _IGNORED}.get(key, 0)
            packed[key] = place(value[mask], filler)
        else:
            is_list = isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() > 0)
            if shares and is_list and len(value) == len(ids):
                raise ValueError(
                    f"`documents` must have values for each token to be packed, but {key!r} has one for each document. "
                    f"Remove it from the batch, or do not pack these documents."
                )
            packed[key] = value
    if causal and ("labels" not in batch or batch["labels"].shape[:2] == ids.shape):
        labels = packed["labels"] if "labels" in batch else place(ids[mask], _IGNORED)
        packed["labels"] = labels.flatten(0, 1).index_fill(0, place.starts, _IGNORED).view_as(labels)
    packed["attention_mask"] = place(torch.ones_like(place.positions), 0)
    packed["position_ids"] = place(place.positions + first_position, first_position)
    packed["document_ids"] = place(place.documents, _PADDING)
    return packed


def make_document_mask(
    document_ids: torch.Tensor, *, causal: bool = True, dtype: torch.dtype = torch.bool
) -> torch.Tensor:
    """Make the attention mask with which tokens attend only to tokens of their own document.

    `mask[n, 0, i, j] = document_ids[n, i] == document_ids[n, j] and i >= j`, the latter if causal. Padding is a
    document of its own, so that no row of scores is fully masked.

    Args:
        document_ids: Shape (R, L), integers: the document of each token.
        causal: Tokens do not attend to later tokens.
        dtype: `torch.bool`: True where a token attends to another. A floating dtype: 0 there, and the lowest number
            elsewhere, to be added to scores. Attention layers of `transformers` take the latter; eager attention would
            add the former to scores as 0 and 1.

    Returns:
        Shape (R, 1, L, L), on the device of `document_ids`.

    Raises:
        ValueError: `document_ids` has another shape, or `dtype` is neither bool nor floating.

    Example:
        >>> make_document_mask(torch.tensor([[0, 0, 1]])).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]

    Source: Krell, Kosec, Perez and Fitzgibbon, "Efficient Sequence Packing without Cross-contamination", arXiv:
        2107.02027, section 3.2.
    Differs: none.
    """
    _check_ids(document_ids)
    if dtype is not torch.bool and not dtype.is_floating_point:
        raise ValueError(f"`dtype` must be `torch.bool` or a floating dtype, got {dtype}.")
    mask = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    if causal:
        mask = mask.tril()
    if dtype is torch.bool:
        return mask
    zeros = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zeros, torch.finfo(dtype).min)


def make_block_mask(document_ids: torch.Tensor, *, causal: bool = True) -> BlockMask:
    """Make the mask of `make_document_mask` for `torch.nn.attention.flex_attention`, which skips masked blocks.

    Args:
        document_ids: Shape (R, L), integers: the document of each token.
        causal: Tokens do not attend to later tokens.

    Returns:
        A block mask for R rows and any number of heads.

    Raises:
        ValueError: `document_ids` has another shape.

    Example:
        >>> make_block_mask(torch.tensor([[0, 0, 1]])).shape
        (1, 1, 3, 3)

    Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels",
        arXiv:2412.05496, section 3.
    Differs: none.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    _check_ids(document_ids)
    rows, length = document_ids.shape

    def sees(row: torch.Tensor, head: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        same = document_ids[row, i] == document_ids[row, j]
        return same & (i >= j) if causal else same

    mask: BlockMask = create_block_mask(sees, rows, None, length, length, device=document_ids.device)
    return mask


def count_tokens(batch: Mapping[str, Any], causal: bool = True) -> dict[str, int]:
    """Count the tokens of a batch without padding, and those with a loss, in packed batches and others.

    As `get_num_tokens_in_batch` of a `DataSpec`, it lets timestamps count tokens of documents. Together with
    `accumulate_train_batch_on_tokens=True`, microbatches and ranks are then weighted by the tokens of their loss also
    if the model does not say which labels it ignores.

    Args:
        batch: On the host: with `input_ids` of shape (N, S), `labels` of that shape with -100 at tokens without loss,
            and an `attention_mask`; without one of these, all tokens count.
        causal: The labels are the next tokens, so the first of a row has no loss.

    Returns:
        The numbers as "total" and "loss_generating".

    Example:
        >>> count_tokens(pack_sequences([[5, 6, 7, 8], [9, 3], [2]], length=5))
        {'total': 7, 'loss_generating': 4}
    """
    ids, mask, labels = batch["input_ids"], batch.get("attention_mask"), batch.get("labels")
    labels = ids if labels is None else labels
    scored = labels[:, 1:] if causal else labels
    total = ids.numel() if mask is None else int(mask.sum())
    return {"total": total, "loss_generating": int((scored != _IGNORED).sum())}


class SequencePacking(Algorithm):
    """Trains on rows of several documents, which do not attend to each other, instead of padded documents.

    At AFTER_DATALOADER the documents of a batch, the rows without padding, are packed into fewer rows; see
    `pack_sequences`. At BEFORE_FORWARD the `attention_mask` of the microbatch is replaced by one of shape (R, 1, L, L),
    with which tokens attend only to their own document; see `make_document_mask`. A model of `transformers` with the
    attention "flex_attention" gets a block mask instead if it is on a GPU; see `make_block_mask`.

    A batch has the same documents as without packing, so training is equal up to rounding: steps, epochs and schedules
    mean the same, nothing is left over between batches, and resumption is exact without a state of its own. The last
    row of a batch is partly empty; this matters little if batches have several rows. Documents are packed in the main
    process, where their lengths are known, from batches of any loader. A loader whose `collate_fn` is
    `partial(pack_sequences, length=...)` packs in its workers instead; its batches are not packed again, and their
    samples are rows.

    The first microbatch of a `fit` shows whether the model keeps documents apart: the second of two documents in a row
    must have the same outputs as alone, without mask and positions. So positions, the direction of attention and
    windows are checked, too. The check is skipped for outputs without values for each token.

    Samples and tokens of timestamps are counted before batches are packed: samples are documents, and tokens those of
    the loader's batches, padding included, unless its `DataSpec` counts with `count_tokens`. Microbatches are parts of
    the packed batch: `device_train_microbatch_size` is a number of rows. They are weighted by the labels that the loss
    counts, so that they equal the whole batch.

    **Events** FIT_START, AFTER_DATALOADER, BEFORE_FORWARD. **Reads** the batch, a mapping with `input_ids`; attributes
    of the model. **Writes** the batch. **Cost** packing a batch on the host; a mask of R * L * L numbers for each
    microbatch; two forward passes of one row in each `fit`, whose outputs are compared, which reads from the device
    once. Saves computation and memory in proportion to the padding.
    **Compilation** the number of rows varies from batch to batch: a compiled model is recompiled once, with a dynamic
    number of rows.

    **Logs** `sequence_packing/rows` and `sequence_packing/fill`, the fraction of tokens that are not padding.

    **When not to use it** documents have nearly the same length; there is one label for each document, such as a class;
    the attention takes no mask of this form (state-space models, flash attention, relative positions from the mask).

    Args:
        length: The length L of the rows, at least that of the longest document.
        causal: Tokens do not attend to later tokens, and labels are the next tokens. None: as the attention layers of
            the model say, which are those with an attribute `is_causal`; True if there are none.
        split_long: Split documents of more than L tokens, which are an error otherwise.
        pad_token_id: The token in the rest of a row.
        first_position: The position of the first token of a document. None: one more than the `padding_idx` of the
            position embeddings, such as 2 for RoBERTa, and 0 for models without it.

    Raises:
        TypeError: An argument, or at the first batch the batch, has the wrong type.
        ValueError: `length` is below 2, or another number is negative. At FIT_START, if the model is an
            encoder-decoder, uses flash attention, or has a window shorter than L. At the first batch, if documents in
            one row affect each other. At any batch, as in `pack_sequences`, or if `labels` of a causal model are
            missing.

    Example:
        >>> SequencePacking(length=2048).split_long
        False

    Source: Krell, Kosec, Perez and Fitzgibbon, "Efficient Sequence Packing without Cross-contamination", arXiv:
        2107.02027.
    Differs: documents of a batch are packed together, so that batches are those of training without packing.
    """

    events = frozenset({Event.FIT_START, Event.AFTER_DATALOADER, Event.BEFORE_FORWARD})
    placement = Placement(
        provides={PACKS_SEQUENCES},
        after={PRUNES_BATCH, TRANSFORMS_BATCH},
        excludes={PACKS_SEQUENCES, RESHAPES_SEQUENCES, CHANGES_LENGTH},
    )

    def __init__(
        self,
        length: int,
        causal: bool | None = None,
        split_long: bool = False,
        pad_token_id: int = 0,
        first_position: int | None = None,
    ) -> None:
        _check_arguments(length, split_long, pad_token_id, first_position or 0)
        if causal is not None:
            check_flags(causal=causal)
        self.length, self.causal, self.split_long = plain_number(length), causal, split_long
        self.pad_token_id = plain_number(pad_token_id)
        self.first_position = None if first_position is None else plain_number(first_position)
        self._needs: _Needs | None = None
        self._longest: int | None = None  # tokens of a document of the first batch
        self._is_checked = False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Inspect the model, pack the batch, or make the mask of a microbatch."""
        if event is Event.FIT_START or self._needs is None:
            model = unwrapped_model(state.model)
            implementations = _check_model(model, self.length)
            self._needs = _Needs(
                causal=_is_causal(model) if self.causal is None else self.causal,
                first_position=_first_position(model) if self.first_position is None else self.first_position,
                dtype=next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32),
                takes_blocks="flex_attention" in implementations,
            )
            self._longest, self._is_checked = None, False
        if event is Event.AFTER_DATALOADER:
            self._pack(state, self._needs, logger)
        elif event is Event.BEFORE_FORWARD:
            if not self._is_checked:
                self._is_checked = True
                _check_isolation(state, self._needs, self._longest or 1)
            state.batch = _with_mask(state.batch, self._needs)

    def _pack(self, state: State, needs: _Needs, logger: Logger) -> None:
        batch = state.batch
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            found = f"one with {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
            raise TypeError(f"`SequencePacking` needs batches that are mappings with 'input_ids', got {found}.")
        if needs.causal and "labels" not in batch:
            raise ValueError(
                f"`SequencePacking` needs the 'labels' of a causal model, got a batch with {sorted(map(str, batch))}. "
                f"Let the collator add them: the `input_ids`, with {_IGNORED} at padding."
            )
        if "document_ids" not in batch:
            batch = state.batch = pack_sequences(
                batch,
                self.length,
                causal=needs.causal,
                split_long=self.split_long,
                pad_token_id=self.pad_token_id,
                first_position=needs.first_position,
            )
        if self._longest is None:
            self._longest = int(batch["position_ids"].max()) - needs.first_position + 1
        if logger.destinations:
            fill = batch["attention_mask"].float().mean()
            logger.log_metrics({"sequence_packing/rows": len(batch["input_ids"]), "sequence_packing/fill": fill})


@dataclass(frozen=True)
class _Needs:
    """Requirements of a model on packed rows.

    Attributes:
        causal: Tokens do not attend to later tokens.
        first_position: The position of the first token of a document.
        dtype: Of the weights, and of dense masks.
        takes_blocks: Its attention takes block masks on a GPU.
    """

    causal: bool
    first_position: int
    dtype: torch.dtype
    takes_blocks: bool


# ---- packing ----


def _check_arguments(length: Any, split_long: Any, pad_token_id: Any, first_position: Any) -> None:
    check_integers("A row of one token has no next token to predict.", length=length, least=2)
    check_integers(pad_token_id=pad_token_id, first_position=first_position, least=0)
    check_flags(split_long=split_long)


def _as_batch(documents: Any) -> dict[str, Any]:
    """Return a batch of documents with padding."""
    if isinstance(documents, Mapping):
        batch = dict(documents)
    elif isinstance(documents, Sequence) and not isinstance(documents, str):
        batch = _pad(documents)
    else:
        raise TypeError(f"`documents` must be a mapping or a sequence of documents, got {type(documents).__name__}.")
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        got = f"shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else f"{type(ids).__name__}"
        raise ValueError(f"`documents` must have `input_ids` of shape (N, S), got {got}.")
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"`attention_mask` must have the shape of `input_ids`, {tuple(ids.shape)}, got {tuple(mask.shape)}."
        )
    return batch


def _pad(documents: Sequence[Any]) -> dict[str, torch.Tensor]:
    mappings = [each if isinstance(each, Mapping) else {"input_ids": each} for each in documents]
    if not mappings:
        raise ValueError("`documents` must not be empty.")
    columns = {key: [torch.as_tensor(each[key]) for each in mappings] for key in mappings[0]}
    lengths = [ids.shape[:1] for ids in columns["input_ids"]]
    for key, values in columns.items():
        if any(value.shape[:1] != size for value, size in zip(values, lengths, strict=True)):
            raise ValueError(f"`documents` must have a value for each token, which {key!r} has not.")
    columns.setdefault("attention_mask", [torch.ones(size, dtype=torch.int64) for size in lengths])
    return {key: pad_sequence(values, batch_first=True) for key, values in columns.items()}


def _split_lengths(lengths: list[int], length: int, split_long: bool) -> list[int]:
    """Return the lengths of the documents to pack. Those without tokens are left out."""
    longest = max(lengths, default=0)
    if longest > length and not split_long:
        raise ValueError(
            f"`documents` must not have more than `length` tokens, {length}, got one with {longest}. Use a larger "
            f"`length`, truncate the documents, or split them with `split_long=True`."
        )
    if not longest:
        raise ValueError("`documents` must have tokens, got only padding. Leave such batches out.")
    return [min(length, size - start) for size in lengths for start in range(0, size, length)]


def _assign_rows(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Return the documents of each row, by best-fit decreasing."""
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # the free tokens of a row, and its index, sorted
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        at = bisect_left(spaces, (lengths[index], 0))
        if at == len(spaces):
            rows.append([])
            space, row = length, len(rows) - 1
        else:
            space, row = spaces.pop(at)
        rows[row].append(index)
        insort(spaces, (space - lengths[index], row))
    return sorted(sorted(row) for row in rows)


class _Places:
    """Puts the tokens of all documents, one after the other, into their places in the rows.

    Attributes:
        positions: The position of each token in its document.
        documents: The document of each token.
        starts: The places of the first tokens of the documents.
    """

    def __init__(self, rows: list[list[int]], lengths: list[int], length: int, device: torch.device) -> None:
        self.shape = (len(rows), length)
        starts = [0] * len(lengths)
        for row, members in enumerate(rows):
            ends = itertools.accumulate((lengths[index] for index in members), initial=row * length)
            for index, start in zip(members, ends, strict=False):
                starts[index] = start
        self.starts, sizes = torch.tensor(starts, device=device), torch.tensor(lengths, device=device)
        self.documents = torch.repeat_interleave(sizes)
        self.positions = torch.arange(sum(lengths), device=device) - (sizes.cumsum(0) - sizes)[self.documents]
        self._places = self.starts[self.documents] + self.positions

    def __call__(self, tokens: torch.Tensor, filler: int) -> torch.Tensor:
        """Return the rows, shape (R, L, ...), of values of shape (tokens, ...), with `filler` at padding."""
        rows, length = self.shape
        flat = tokens.new_full((rows * length, *tokens.shape[1:]), filler)
        flat[self._places] = tokens
        return flat.view(rows, length, *tokens.shape[1:])


def _check_ids(document_ids: torch.Tensor) -> None:
    if document_ids.dim() != 2:
        raise ValueError(f"`document_ids` must have shape (R, L), got {tuple(document_ids.shape)}.")


# ---- models ----


def _is_causal(model: torch.nn.Module) -> bool:
    flags = [flag for module in model.modules() if isinstance(flag := getattr(module, "is_causal", None), bool)]
    return any(flags) if flags else True


def _first_position(model: torch.nn.Module) -> int:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and "position" in name.rpartition(".")[2]:
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def _check_model(model: torch.nn.Module, length: int) -> set[str]:
    """Return the attention implementations of models of `transformers` in a model.

    Raises:
        ValueError: One of them cannot keep documents apart.
    """
    configs = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    implementations = {str(getattr(config, "_attn_implementation", "")) for config in configs}
    for name in sorted(implementations):
        if "flash" in name:
            raise ValueError(
                f"`SequencePacking` needs attention that takes a mask, got {name!r}. Build the model with "
                f"`attn_implementation='sdpa'`, or 'flex_attention' on a GPU."
            )
    for config in configs:
        kind = type(config).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"`SequencePacking` cannot pack for an encoder-decoder, got a model with `{kind}`.")
        window = getattr(config, "sliding_window", None)
        if isinstance(window, int) and window < length:
            raise ValueError(
                f"`length` must not be more than the window of attention, {window} tokens, got {length} for a model "
                f"with `{kind}`: the mask of documents replaces that of the window."
            )
    return implementations


def _with_mask(batch: Mapping[str, Any], needs: _Needs) -> dict[str, Any]:
    """Return a batch with the mask of its documents."""
    ids = batch["document_ids"]
    mask: Any
    if needs.takes_blocks and ids.device.type == "cuda":
        mask = make_block_mask(ids, causal=needs.causal)
    else:
        mask = make_document_mask(ids, causal=needs.causal, dtype=needs.dtype)
    return {**batch, "attention_mask": mask}


def _check_isolation(state: State, needs: _Needs, longest: int) -> None:
    """Compare the outputs of a document in a row with those of the document alone.

    Args:
        state: Its batch is a packed microbatch on the device. Weights, buffers and random numbers stay as they are.
        needs: What the model needs.
        longest: Tokens of the longest document: the model has positions for that many.

    Raises:
        ValueError: They differ, or the model does not take the mask.
    """
    batch = state.batch
    if batch["input_ids"].is_meta:  # such tensors have no values to compare
        return
    # Padding is left out, since models may treat it in ways of their own.
    size = min(longest, _CHECKED, batch["input_ids"].shape[1] // 2, int(batch["attention_mask"][0].sum()))
    if size < 1:
        return
    shape = batch["input_ids"].shape
    both: dict[str, Any] = {}
    for key, value in batch.items():
        is_per_row = isinstance(value, torch.Tensor) and value.dim() and len(value) == len(batch["input_ids"])
        row = value[:1] if is_per_row else value
        if is_per_row and value.shape[:2] == shape:
            row = torch.cat((row[:, :1].repeat_interleave(size, 1), row[:, :size]), 1)
        both[key] = row
    one = {
        key: value[:, size:] if isinstance(value, torch.Tensor) and value.shape[:2] == (1, 2 * size) else value
        for key, value in both.items()
        if key not in ("position_ids", "document_ids")
    }
    one["attention_mask"] = torch.ones_like(one["attention_mask"])
    documents = torch.arange(2 * size, device=batch["input_ids"].device) // size
    both["document_ids"] = documents[None]
    both["position_ids"] = (torch.arange(2 * size, device=documents.device) % size)[None] + needs.first_position
    packed, alone = _outputs_of(state, _with_mask(both, needs), one)
    if packed is None or alone is None or packed.dim() < 3 or packed.shape[:2] != (1, 2 * size):
        return
    difference = (packed[:, size:] - alone).abs().max()
    largest = alone.abs().max()
    # A model that a host has prepared computes in the precision of the run, and may return float32.
    dtype = alone.dtype if state.precision is Precision.FP32 else torch.bfloat16
    if difference > max(1e-3, 8 * torch.finfo(dtype).eps) * largest:
        raise ValueError(
            f"`SequencePacking` needs a model that keeps the documents of a row apart, got one whose outputs for a "
            f"document differ by {difference.item():.2g} if another one precedes it, and are at most "
            f"{largest.item():.2g}. The model must use `attention_mask` of shape (R, 1, L, L) in every layer, and "
            f"`position_ids`. If `causal={needs.causal}` is not what the model does, set `causal`."
        )


@torch.no_grad()
def _outputs_of(state: State, *batches: dict[str, Any]) -> list[torch.Tensor | None]:
    """Return the logits of a model in evaluation mode for batches."""
    model = unwrapped_model(state.model)
    found: list[torch.Tensor | None] = []
    with model_eval_mode(model), torch.compiler.set_stance("force_eager"):
        for batch in batches:
            try:
                # In the loop of others, a model of transformers is called as they do.
                outputs: Any = model(batch) if isinstance(model, ComposerModel) else model(**batch)
            except torch.OutOfMemoryError:
                raise
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"`SequencePacking` needs a model that takes an `attention_mask` of shape (R, 1, L, L), got one "
                    f"that fails with {type(error).__name__}: {error}"
                ) from error
            logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
            found.append(logits if isinstance(logits, torch.Tensor) and logits.is_floating_point() else None)
    return found
