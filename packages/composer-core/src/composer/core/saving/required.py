"""Apply the algorithms that a saved model requires before it can be loaded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer.core import _registry
from composer.core.algorithm import Algorithm, declared_events
from composer.core.event import Event
from composer.core.logging import Logger, LoggerDestination
from composer.core.ordering import ConflictError, Ordering, OrderingError
from composer.core.passes import PassInput, parse_passes
from composer.core.saving.rebuild import rebuild
from composer.utils.iter_helpers import ensure_tuple
from composer.utils.misc import unwrapped_model

if TYPE_CHECKING:
    from composer.core.state import State

_GROUP = "composer.algorithms"


def add_required_algorithms(
    state: State,
    saved: dict[str, Any],
    logger: Logger | None,
    exclude: str | Sequence[str] | None,
    passes: PassInput,
) -> None:
    """Add the algorithms that the saved run required and this run lacks to `state.algorithms`, and apply them.

    Only algorithms that act at INIT are applied. If an algorithm replaces the whole model, `state` gets the metrics of
    the new model, so that saved metrics can be loaded.

    Args:
        state: The state to load into.
        saved: The saved state. If `algorithms` is a dict, as early releases of MosaicML's Composer wrote it,
            it is ignored.
        logger: The logger for the algorithms; None: a logger with the destinations among `state.callbacks`.
        exclude: Class names of algorithms to leave out.
        passes: The passes that order the algorithms, as for `Engine`.

    Raises:
        ModuleNotFoundError: The package of a required algorithm is not installed.
        ValueError: An algorithm cannot be added: its placement conflicts with others, it fails, the model is wrapped,
            or it must act before an algorithm that has acted already.
    """
    entries = saved.get("algorithms")
    if not isinstance(entries, list):
        return
    live, excluded = list(state.algorithms), ensure_tuple(exclude)
    missing = [_rebuild_missing(name, entry, live) for name, entry in entries if name not in excluded]
    added = [algorithm for algorithm in missing if algorithm is not None]
    if not added:
        return
    order = _order(state, live, added, passes)
    acting = [algorithm for algorithm in order if algorithm in added]
    if acting and state.is_model_ddp:
        raise ValueError(
            f"{_listed(acting)} of the checkpoint cannot be applied to a model that is wrapped in "
            f"`DistributedDataParallel`, which would not reduce the gradients of new parameters. "
            f"Load before wrapping."
        )
    if order[len(order) - len(acting) :] != acting:
        late = [algorithm for algorithm in order[order.index(acting[0]) :] if algorithm not in added]
        raise ValueError(
            f"{_listed(acting[:1])} of the checkpoint must act before {_listed(late)}, which was applied already. "
            f"{_advice(added)}"
        )
    for algorithm in added:
        warnings.warn(
            f"Automatically adding required_on_load algorithm `{algorithm!r}`: the checkpoint was saved with it. Pass "
            f"it in `algorithms` to silence this warning, or leave it out with "
            f"`load_exclude_algorithms=['{type(algorithm).__name__}']`.",
            stacklevel=5,
        )
    model = state.model
    _apply(state, added, acting, logger)
    if state.model is not model:
        _reset_metrics(state)


def _reset_metrics(state: State) -> None:
    """Replace the metrics of the state by new ones of its model."""
    get_metrics = getattr(unwrapped_model(state.model), "get_metrics", None)
    if get_metrics is None:  # a custom loop may train a model that is not a `ComposerModel`
        return
    state.train_metrics = dict(copy.deepcopy(get_metrics(is_train=True)))
    for evaluator in state.evaluators:
        metrics = copy.deepcopy(get_metrics(is_train=False))
        state.eval_metrics[evaluator.label] = evaluator.select_metrics(metrics)


def _rebuild_missing(name: str, entry: dict[str, Any], live: Sequence[Algorithm]) -> Algorithm | None:
    """Rebuild a saved algorithm if it is required and the run has none of its class; else return None."""
    same = [algorithm for algorithm in live if type(algorithm).__qualname__ == name]
    cls = type(same[0]) if same else _installed(name)
    text: Any = entry.get("repr")
    if cls is None or not cls.required_on_load() or text in map(repr, same):
        return None
    try:
        rebuilt = rebuild(cls, text)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:  # ImportError is raised as is
        if not same:
            warnings.warn(
                f"The required_on_load algorithm `{name}`, with which the checkpoint was saved, could not be rebuilt: "
                f"{_sentence(error)} Construct it and pass it in `algorithms`, or leave it out with "
                f"`load_exclude_algorithms=['{name}']`.",
                stacklevel=7,
            )
            return None
    else:
        if not same:
            return rebuilt
        if repr(rebuilt) in map(repr, same):  # only written differently
            return None
    warnings.warn(
        f"The required_on_load algorithm `{name}` of the checkpoint was `{text}`, but this run uses "
        f"`{same[0]!r}`. Pass the same arguments if the model does not load.",
        stacklevel=7,
    )
    return None


def _installed(name: str) -> type[Algorithm] | None:
    """Return the registered algorithm class of a name; None if there is none.

    Raises:
        ModuleNotFoundError: The class is required, and the package of this project that provides it is not installed.
    """
    if name in _registry.points(_GROUP):
        cls = _registry.load(_GROUP, name)
        return cls if isinstance(cls, type) and issubclass(cls, Algorithm) else None
    distribution = _registry.required_on_load().get(name)
    if distribution is None:
        return None
    raise ModuleNotFoundError(
        f"The checkpoint was saved with the required_on_load algorithm `{name}` of `{distribution}`, which is not "
        f"installed. Run `pip install {distribution}`, or leave it out with `load_exclude_algorithms=['{name}']`."
    )


def _order(state: State, live: Sequence[Algorithm], added: Sequence[Algorithm], extra: PassInput) -> list[Algorithm]:
    """Return all algorithms that act at INIT, in order."""
    algorithms = [*live, *added]
    try:
        placed = [algorithms[i] for i in Ordering(algorithms).forward]
    except (ConflictError, OrderingError) as error:
        raise ValueError(
            f"{_listed(added)} of the checkpoint cannot be added to this run. {error} {_advice(added)}"
        ) from error
    order: Sequence[Algorithm] = [
        algorithm
        for algorithm in placed
        if ((events := declared_events(algorithm)) is None or Event.INIT in events)
        and algorithm.match(Event.INIT, state)
    ]
    for algorithm_pass, _ in parse_passes(extra):
        order = algorithm_pass(order, Event.INIT)
    return list(order)


def _apply(state: State, added: Sequence[Algorithm], acting: Sequence[Algorithm], logger: Logger | None) -> None:
    if logger is None:
        logger = Logger(state, [c for c in state.callbacks if isinstance(c, LoggerDestination)])
    for algorithm in acting:
        try:
            algorithm.apply(Event.INIT, state, logger)
        except Exception as error:
            raise ValueError(
                f"{_listed([algorithm])} of the checkpoint could not be applied to the model: {_sentence(error)} "
                f"{_advice([algorithm])}"
            ) from error
    state.algorithms.extend(added)


def _sentence(error: Exception) -> str:
    return f"{str(error).rstrip('.')}."


def _listed(algorithms: Sequence[Algorithm]) -> str:
    return " and ".join(f"`{type(algorithm).__name__}`" for algorithm in algorithms)


def _advice(algorithms: Sequence[Algorithm]) -> str:
    calls = ", ".join(repr(algorithm) for algorithm in algorithms)
    names = [type(algorithm).__name__ for algorithm in algorithms]
    return (
        f"Pass `algorithms=[{calls}, ...]`, so that it acts in its declared order, or leave it out with "
        f"`load_exclude_algorithms={names}` if the model already has the changed layers."
    )
