"""How a batch is cut: shards per rank and micro-batches under a token budget, and results put back in the caller's order.

:func:`plan_batch` makes a :class:`BatchPlan`, balanced by a :class:`CostModel`. Needs numpy only.
"""

from arctic_core.batching.cost import CostModel
from arctic_core.batching.plan import BatchPlan, plan_batch

__all__ = ["BatchPlan", "CostModel", "plan_batch"]
