"""A picture of a whole trie with graphviz: every node with its number, its prefix and its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lmpool.errors import InvalidWeights, SettingsError

if TYPE_CHECKING:
    import graphviz

_WHITE = "#ffffff"


def draw(
    children: list[dict[Any, int]], prefixes: dict[int, list[Any]], leaves: dict[int, Any], ws: Any = None
) -> graphviz.Digraph:
    """Draw a trie from left to right; the leaves have double circles.

    Args:
        children: for every node its children by letter.
        prefixes: the letters on the way to every node.
        leaves: the nodes that are leaves.
        ws: the weight of every node, or None; the greatest is the greenest.

    Raises:
        InvalidWeights: not one weight for each node.
        SettingsError: graphviz is not installed.
    """
    try:
        import graphviz
    except ImportError as error:
        raise SettingsError("graphviz is not installed: pip install 'lmpool[genlm]'") from error
    weights = None if ws is None else np.asarray(ws)
    if weights is not None and weights.shape != (len(children),):
        raise InvalidWeights(f"weights of shape {weights.shape} for {len(children)} nodes: give one for each")
    dot = graphviz.Digraph(comment="Token Character Trie")
    dot.attr(rankdir="LR")
    _add_legend(dot)
    highest = None if weights is None else weights.max()
    for node in range(len(children)):
        label = f"{node}\n'{prefixes[node]}'"
        color = _WHITE
        if weights is not None:
            label += f"\n{weights[node]:.4f}"
            color = _green(weights[node], highest)
        shape = "doublecircle" if node in leaves else "circle"
        dot.node(str(node), label, shape=shape, style="filled", fillcolor=color)
    for node, kids in enumerate(children):
        for letter, kid in kids.items():
            is_end = isinstance(letter, tuple) and letter[0] is None
            dot.edge(str(node), str(kid), label=f"End-of-Token (ID: {letter[1]})" if is_end else str(letter))
    return dot


def _add_legend(dot: graphviz.Digraph) -> None:
    with dot.subgraph(name="cluster_legend") as legend:
        legend.attr(label="Legend", fontsize="10")
        legend.attr("node", fontsize="7", width="0.1", height="0.1")
        legend.node("legend_internal", "Internal Node ID\n'Prefix'\nWeight (if provided)", shape="circle")
        legend.node("legend_leaf", "Complete Token", shape="doublecircle")
        legend.edge("legend_internal", "legend_leaf", label="Token item", fontsize="10")
        legend.attr(rankdir="TB")
        legend.attr(rank="same")


def _green(weight: Any, highest: Any) -> str:
    """White for nothing, full green for the highest weight."""
    if not highest > 0:
        return _WHITE
    rest = min(max(int(255 * (1 - weight / highest)), 0), 255)
    return f"#{rest:02x}ff{rest:02x}"
