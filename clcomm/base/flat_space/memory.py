"""How many bytes of a model a rank has, by what the ranks divide."""

from __future__ import annotations

from typing import NamedTuple

from clcomm.base.flat_space.layout import ShardPlan
from clcomm.base.flat_space.parameters import FLOAT32, Precision


class MemoryUse(NamedTuple):
    """Bytes on a rank; of memory common to a host's ranks, the rank's share.

    gradients: that last from backward to step. in_flight: beside these, gradients that are being written or reduced,
    and parameters gathered for use, at most at one time.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    in_flight: int

    @classmethod
    def expected(
        cls,
        plan: ShardPlan,
        stage: int,
        buffers: int,
        shares: bool,
        in_place: bool,
        precision: Precision = FLOAT32,
        *,
        receives: bool = False,
    ) -> MemoryUse:
        """Return what a run will have, if backward completes gradients in the layout's order.

        Args:
            plan: the units and their parts.
            stage: of ZeRO; 0: nothing is divided.
            buffers: of the optimizer's state, each as large as the parameters are as float32.
            shares: whether all ranks have memory in common.
            in_place: whether their devices compute in it.
            precision: what parameters are stored and gathered in.
            receives: whether gradients that are not divided come through MPI, which has a place for all of them.
        """
        whole, part, ranks = plan.layout.span, plan.shard_nbytes, plan.ranks
        means = 0 if ranks == 1 else whole // ranks if shares else whole
        gathers = ranks > 1 and not (shares and in_place)
        parameters = precision.nbytes(part if stage > 2 or (stage > 0 and not gathers) else whole)
        gradients = part if stage > 1 else whole + means
        in_flight = whole if receives and not stage else 0
        if stage > 1:
            row = ranks * plan.largest_part
            writing = min(2, len(plan.units)) * plan.largest
            in_flight = writing + (2 if shares and ranks > 1 else 1) * row + plan.largest_part
            if stage > 2 and gathers:
                in_flight += min(2, len(plan.units)) * plan.largest + precision.nbytes(row + plan.largest_part)
        return cls(parameters, gradients, buffers * (part if stage else whole), in_flight)
