"""The protocol's verbs with arrays in and out: numpy or torch, whichever the caller gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from engram_client.arrays import Array, Landing, sent
from engram_client.exchange import Effects
from engram_client.protocol import EngramProtocol, StepOptions
from engram_client.segments import Segment, StepResult, batch_of
from engram_client.state import SessionState
from engram_client.wire import to_numpy


def weights(
    protocol: EngramProtocol, layer: int, names: Sequence[str]
) -> Effects[dict[str, NDArray[Any]]]:
    """Fetch a layer's weights as numpy arrays."""
    views = yield from protocol.weights(layer, names)
    return {name: to_numpy(view) for name, view in views.items()}


def apply(
    protocol: EngramProtocol,
    state: SessionState,
    layer: int,
    residual: Array,
    position: int | None,
    out: Array | None,
) -> Effects[Array]:
    """Return the updated residual, of the kind and on the device of the one given."""
    source = sent(residual)
    landing = Landing(out, like=residual, sources=(source,))
    view = yield from protocol.apply(state, layer, source, position=position, out=landing.view)
    return landing.result(view)


def read(
    protocol: EngramProtocol,
    state: SessionState,
    output: str,
    layer: int,
    position: int | None,
    count: int | None,
    out: Array | None,
    *,
    stored: bool = False,
) -> Effects[Array]:
    """Return kv, rows or hash_ids: numpy, or what `out` is."""
    landing = Landing(out)
    view = yield from protocol.read(
        state, output, layer, position=position, count=count, stored=stored, out=landing.view
    )
    return landing.result(view)


def step(
    protocol: EngramProtocol,
    segments: Sequence[Segment],
    options: StepOptions,
    residual: Array | None,
    out: Array | Mapping[int, Array] | None,
    *,
    given: Sequence[SessionState] = (),
) -> Effects[StepResult]:
    """Push and read segments; see `EngramClient.step`.

    given: sessions that the caller has locked, and unlocks
    """
    check_step(options, residual)
    outs = _outs(out, options)
    facts = yield from protocol.facts()
    batch = batch_of(segments, facts.max_ngram_size)
    source = None if residual is None else sent(residual)
    if source is not None and source.shape[:1] != (batch.num_tokens,):
        raise ValueError(f"residual: expected {batch.num_tokens} rows, got {list(source.shape)}")
    sources = () if source is None else (source,)
    landings = {
        layer: Landing(outs.get(layer), like=residual, sources=sources) for layer in options.names
    }
    views = {layer: landing.view for layer, landing in landings.items() if landing.view is not None}
    answer = yield from protocol.step(batch, options, source, views, given=given)
    tensors = {layer: landings[layer].result(view) for layer, view in answer.outputs.items()}
    return StepResult(answer.length, answer.epoch, answer.dead, tensors)


def check_step(options: StepOptions, residual: Array | None) -> None:
    """Refuse what no service could answer. Raises ValueError."""
    if options.output not in ("residual", "kv", "rows", "hash_ids", "none"):
        raise ValueError(
            f"output: expected residual, kv, rows, hash_ids or none, got {options.output!r}"
        )
    if (options.output == "residual") != (residual is not None):
        got = f"output={options.output!r} {'without' if residual is None else 'with'} one"
        raise ValueError(f"residual: expected with output='residual' and only there, got {got}")
    if residual is not None and len(options.layers) != 1:
        raise ValueError(f"layers: expected one layer with a residual, got {options.layers}")


def _outs(out: Array | Mapping[int, Array] | None, options: StepOptions) -> Mapping[int, Array]:
    """Return `out` by layer. Raises ValueError."""
    if out is None:
        return {}
    if isinstance(out, Mapping):
        if not out.keys() <= options.names.keys():
            raise ValueError(f"out: expected layers among {list(options.names)}, got {list(out)}")
        return out
    if len(options.names) != 1:
        raise ValueError(f"out: expected arrays by layer, {list(options.names)}, got one array")
    return dict.fromkeys(options.names, out)
