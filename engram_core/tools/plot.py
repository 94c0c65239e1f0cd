"""A comparison as a picture. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from engram_core.errors import EngramError
from engram_core.tools.compare import Comparison, order_name

_PANELS = {
    "rows": "rows: relative RMS error",
    "kv": "kv: relative RMS error",
    "gate": "gate: RMS difference",
    "update": "residual update: relative RMS error",
}


def plot(comparison: Comparison, path: Path) -> None:
    """Write a PNG: a panel a quantity, a group of bars an n-gram order, a bar a layer.

    Raises: EngramError naming the extra where matplotlib is not installed.
    """
    figures = require_plot()
    figure = figures.Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(f"{comparison.b} against {comparison.a}, {comparison.num_tokens:,} tokens")
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
        _panel(axes, comparison, name)
        axes.set_title(title)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right")
    figure.savefig(path, format="png", dpi=120)


def require_plot() -> Any:
    """Import `matplotlib.figure`, before long work. Raises: EngramError naming the extra."""
    try:
        return import_module("matplotlib.figure")
    except ImportError:
        raise EngramError(
            "a plot needs matplotlib, which is not installed; install engram-service[plot]",
            expected="matplotlib",
            got="none",
        ) from None


def _panel(axes: Any, comparison: Comparison, name: str) -> None:
    layers = list(dict.fromkeys(d.layer_id for d in comparison.distances))
    orders = list(dict.fromkeys(d.order for d in comparison.distances))
    width = 0.8 / len(layers)
    for i, layer_id in enumerate(layers):
        values = [getattr(d, name) for d in comparison.distances if d.layer_id == layer_id]
        left = [place + (i - (len(layers) - 1) / 2) * width for place in range(len(orders))]
        bars = axes.bar(left, values, width, label=f"layer {layer_id}")
        axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=7, padding=1)
    axes.set_xticks(range(len(orders)), [order_name(order) for order in orders])
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    axes.margins(y=0.15)
