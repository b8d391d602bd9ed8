"""Gated DeltaNet layers on a packed forest: every node starts from the states in which its parent ends.

Two states run along a sequence: the last K - 1 inputs of the causal convolution (kernel size K), and the matrix
``S`` [key dim, value dim] of each head in ``S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T``. All
projections, the gated norm and the rule itself are the layer's own. The convolution runs over the packed tokens at once; only
the first K - 1 tokens of a node are done again, with the tokens of their path. The rule runs level by level: nodes of one
level are a batch (padded in groups of like length, or as variable lengths if the layer's kernel takes ``cu_seqlens``) whose
initial states are gathered from the level above. Padding has ``beta = g = 0`` and ``k = 0``, which leaves a state as it is, so
states at the end of nodes are exact for any length.

Suffix legend: T packed tokens, C convolution channels, F tokens near the start of a node, K kernel size, H value heads,
N nodes of a level, L padded length, D head dim.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from arctic_kernels.zorro.errors import UnsupportedLayerError, ZorroError

if TYPE_CHECKING:
    from arctic_kernels.zorro.forest import ForestStructure, PackedForest

MAX_PADDING = 0.25  # share of a padded batch that may be padding before it is split


@dataclass(frozen=True)
class DeltaGroup:
    """Nodes of one level in one padded batch.

    Attributes:
        rows_NL: int64 rows of T; padding repeats the node's first row.
        valid_NL: bool, False for padding; None if there is none.
        parents_N: int64 index of each node's parent among the nodes of the level above; None for roots.
    """

    rows_NL: torch.Tensor
    valid_NL: torch.Tensor | None
    parents_N: torch.Tensor | None


@dataclass(frozen=True)
class DeltaLevel:
    """Nodes of one level.

    Attributes:
        start: First row of T.
        stop: Row after the last.
        cu_nodes: int64 [N + 1] offsets of the nodes from ``start``.
        parents_N: As in :class:`DeltaGroup`, in the order of the level.
        groups: Padded batches.
        order_N: int64 place of each node in the concatenated groups; None if the order is the same.
        has_children: Whether its final states are needed.
    """

    start: int
    stop: int
    cu_nodes: torch.Tensor
    parents_N: torch.Tensor | None
    groups: tuple[DeltaGroup, ...]
    order_N: torch.Tensor | None
    has_children: bool


@dataclass(frozen=True)
class DeltaPlan:
    """Index tensors for the gated DeltaNet layers of one kernel size on one forest, on the forest's device.

    Attributes:
        levels: Levels of the forest.
        places_T: int64 place of each row of T in the concatenated padded outputs of all groups.
        near_F: int64 rows among the first K - 1 of their node.
        sources_FK: int64 rows that the convolution reads for them, oldest first, itself last.
        exists_FK: bool, False where the path has no such token.
    """

    levels: tuple[DeltaLevel, ...]
    places_T: torch.Tensor
    near_F: torch.Tensor
    sources_FK: torch.Tensor
    exists_FK: torch.Tensor

    @classmethod
    def build(cls, forest: PackedForest, kernel_size: int) -> DeltaPlan:
        """Plan on the host, then copy to the forest's device."""
        structure, device = forest.structure, forest.token_ids.device
        near, sources, exists = _near_rows(structure, kernel_size)
        levels: list[DeltaLevel] = []
        places = np.zeros(int(structure.offsets_N1[-1]), dtype=np.int64)
        base = 0
        for level in range(int(structure.levels_N[-1]) + 1):
            built, base = _build_level(structure, level, places, base, device)
            levels.append(built)
        return cls(
            tuple(levels), _put(places, device), _put(near, device), _put(sources, device), torch.from_numpy(exists).to(device)
        )


def delta_forward(
    module: nn.Module,
    plan: DeltaPlan,
    hidden_states: torch.Tensor,
    cache_params: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Forward of a gated DeltaNet layer on a forest.

    Args:
        module: The layer.
        plan: For the layer's kernel size.
        hidden_states: [1, T, hidden].
        cache_params: Must be None.
        attention_mask: Must be None.
        **kwargs: What else the model passes along; not needed.

    Returns:
        [1, T, hidden].
    """
    del kwargs
    if cache_params is not None or attention_mask is not None:
        raise ZorroError(
            f"{type(module).__name__} got a cache or a mask under use_forest; a forest has no padding and no cache"
        )
    layer: Any = module
    tokens = hidden_states.shape[1]
    mixed_TC, z, b, a = (x[0] for x in _project(layer, hidden_states))
    query, key, value = _convolve(layer, mixed_TC, plan).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    repeat = layer.num_v_heads // layer.num_k_heads
    query, key = (x.view(tokens, layer.num_k_heads, -1).repeat_interleave(repeat, dim=1) for x in (query, key))
    beta = b.sigmoid() * (2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0)
    g = -layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias)
    out_THD = _scan(_rule(layer), plan, (query, key, value.view(tokens, layer.num_v_heads, -1), g, beta))
    norm, project = (layer.norm, layer.out_proj) if hasattr(layer, "norm") else (layer.o_norm, layer.o_proj)
    out = norm(out_THD.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    return project(out.view(1, tokens, -1))


def _project(layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Inputs of the convolution [1, T, C], gate, and the pre-activations of beta and decay [1, T, H]."""
    if hasattr(layer, "in_proj_qkvz"):
        q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
        return torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1), z, b, a
    if hasattr(layer, "in_proj_qkv"):
        return layer.in_proj_qkv(hidden), layer.in_proj_z(hidden), layer.in_proj_b(hidden), layer.in_proj_a(hidden)
    mixed = torch.cat([layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)], dim=-1)
    return mixed, layer.g_proj(hidden), layer.b_proj(hidden), layer.a_proj(hidden)


def _convolve(layer: Any, mixed_TC: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
    """Causal depthwise convolution along each path, then the activation: [T, C]."""
    convolutions = [layer.conv1d] if hasattr(layer, "conv1d") else [layer.q_conv1d, layer.k_conv1d, layer.v_conv1d]
    weight_C1K = torch.cat([x.weight for x in convolutions]) if len(convolutions) > 1 else convolutions[0].weight
    bias_C = None if convolutions[0].bias is None else torch.cat([x.bias for x in convolutions])
    kernel = weight_C1K.shape[-1]
    inputs_TC = mixed_TC.to(weight_C1K.dtype)
    shifted_1CT = functional.pad(inputs_TC.t().unsqueeze(0), (kernel - 1, 0))
    packed_1CT = functional.conv1d(shifted_1CT, weight_C1K, bias_C, groups=len(weight_C1K))
    windows_FKC = inputs_TC[plan.sources_FK] * plan.exists_FK.unsqueeze(-1)
    near_FC = (windows_FKC * weight_C1K[:, 0].t()).sum(dim=1)
    if bias_C is not None:
        near_FC = near_FC + bias_C
    out_TC = packed_1CT[0].t().index_copy(0, plan.near_F, near_FC)
    return _activation(layer, convolutions[0])(out_TC).to(mixed_TC.dtype)


def _activation(layer: Any, convolution: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    act = getattr(layer, "act", None) or getattr(convolution, "act_fn", None)
    if act is not None:
        return act
    from transformers.activations import ACT2FN

    return ACT2FN[getattr(layer, "activation", None) or "silu"]


def _rule(layer: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The layer's chunked delta rule: an attribute of the layer, or a function of its module."""
    rule = getattr(layer, "chunk_gated_delta_rule", None)
    if rule is None:
        rule = getattr(sys.modules.get(type(layer).__module__), "torch_chunk_gated_delta_rule", None)
    if rule is None:
        raise UnsupportedLayerError(type(layer).__name__, "its chunked delta rule was not found")
    return rule


def _scan(rule: Callable[..., Any], plan: DeltaPlan, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Run the rule down the levels; [T, H, value dim]."""
    varlen = "cu_seqlens" in inspect.signature(rule).parameters
    outs: list[torch.Tensor] = []
    state: torch.Tensor | None = None
    for level in plan.levels:
        run = _run_varlen if varlen else _run_padded
        out, state = run(rule, level, inputs, state)
        outs.extend(out)
    return torch.cat(outs) if varlen else torch.cat(outs).index_select(0, plan.places_T)


def _run_varlen(
    rule: Callable[..., Any], level: DeltaLevel, inputs: tuple[torch.Tensor, ...], state: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    initial = None if level.parents_N is None or state is None else state.index_select(0, level.parents_N)
    slices = (x[level.start : level.stop].unsqueeze(0) for x in inputs)
    out, final = _call(rule, slices, initial, level.has_children, cu_seqlens=level.cu_nodes)
    return [out[0]], final


def _run_padded(
    rule: Callable[..., Any], level: DeltaLevel, inputs: tuple[torch.Tensor, ...], state: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    outs, finals = [], []
    for group in level.groups:
        padded = (_gather(x, group) for x in inputs)
        initial = None if group.parents_N is None or state is None else state.index_select(0, group.parents_N)
        out, final = _call(rule, padded, initial, level.has_children)
        outs.append(out.flatten(0, 1))
        finals.append(final)
    if not level.has_children:
        return outs, None
    final = torch.cat(finals) if len(finals) > 1 else finals[0]
    return outs, final if level.order_N is None else final.index_select(0, level.order_N)


def _call(rule: Callable[..., Any], inputs: Any, initial: torch.Tensor | None, final: bool, **options: Any) -> Any:
    query, key, value, g, beta = inputs
    return rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial,
        output_final_state=final,
        use_qk_l2norm_in_kernel=True,
        **options,
    )


def _gather(x_T: torch.Tensor, group: DeltaGroup) -> torch.Tensor:
    """[T, ...] -> [N, L, ...], zeros where padded."""
    padded = x_T.index_select(0, group.rows_NL.flatten()).view(*group.rows_NL.shape, *x_T.shape[1:])
    if group.valid_NL is None:
        return padded
    return padded.masked_fill(~group.valid_NL.view(*group.valid_NL.shape, *[1] * (x_T.ndim - 1)), 0)


def _near_rows(structure: ForestStructure, kernel_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows among the first K - 1 of their node, the rows of their path that the convolution reads, and which of those exist."""
    offsets, parents, starts = structure.offsets_N1, structure.parents_N, structure.starts_N
    lengths = np.diff(offsets)
    depth_NK = np.arange(kernel_size - 1)
    node_F, depth_F = np.nonzero(depth_NK[None, :] < lengths[:, None])
    position_FK = (starts[node_F] + depth_F)[:, None] - np.arange(kernel_size - 1, -1, -1)
    exists_FK = position_FK >= 0
    owner_FK = np.broadcast_to(node_F[:, None], position_FK.shape).copy()
    while (above := exists_FK & (starts[owner_FK] > position_FK)).any():
        owner_FK[above] = parents[owner_FK[above]]
    rows_FK = np.where(exists_FK, offsets[owner_FK] + position_FK - starts[owner_FK], 0)
    return offsets[node_F] + depth_F, rows_FK, exists_FK


def _build_level(
    structure: ForestStructure, level: int, places: np.ndarray, base: int, device: torch.device
) -> tuple[DeltaLevel, int]:
    """One level; writes the places of its rows, which begin at ``base``, and returns where the next level's begin."""
    nodes = np.flatnonzero(structure.levels_N == level)
    first = int(nodes[0])
    offsets = structure.offsets_N1
    lengths = np.diff(offsets)[nodes]
    parents = None
    if level > 0:
        parents = structure.parents_N[nodes] - int(np.searchsorted(structure.levels_N, level - 1))
    groups, members = [], _like_lengths(lengths)
    for member in members:
        longest = max(int(lengths[member].max()), 1)
        inside_NL = np.arange(longest)[None, :] < lengths[member][:, None]
        start_N1 = offsets[nodes[member]][:, None]
        rows_NL = np.minimum(start_N1 + np.where(inside_NL, np.arange(longest)[None, :], 0), offsets[-1] - 1)
        places[rows_NL[inside_NL]] = base + np.flatnonzero(inside_NL)
        base += inside_NL.size
        groups.append(
            DeltaGroup(
                _put(rows_NL, device),
                None if inside_NL.all() else torch.from_numpy(inside_NL).to(device),
                None if parents is None else _put(parents[member], device),
            )
        )
    order = np.argsort(np.concatenate(members), kind="stable")
    built = DeltaLevel(
        start=int(offsets[first]),
        stop=int(offsets[nodes[-1] + 1]),
        cu_nodes=_put(offsets[first : nodes[-1] + 2] - offsets[first], device),
        parents_N=None if parents is None else _put(parents, device),
        groups=tuple(groups),
        order_N=None if np.array_equal(order, np.arange(len(order))) else _put(order, device),
        has_children=bool((structure.levels_N == level + 1).any()),
    )
    return built, base


def _like_lengths(lengths: np.ndarray) -> list[np.ndarray]:
    """Split nodes into batches that are padded by no more than ``MAX_PADDING``; in level order if one batch will do."""
    if lengths.sum() >= (1 - MAX_PADDING) * len(lengths) * lengths.max():
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    groups, begin = [], 0
    while begin < len(order):
        sorted_lengths = lengths[order[begin:]]
        filled = np.cumsum(sorted_lengths) >= (1 - MAX_PADDING) * sorted_lengths[0] * np.arange(1, len(sorted_lengths) + 1)
        count = int(np.flatnonzero(filled)[-1]) + 1
        groups.append(order[begin : begin + count])
        begin += count
    return groups


def _put(x: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)).to(device)
