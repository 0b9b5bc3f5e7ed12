"""Collectives on PyTorch's tensors over a Communicator, for backend "clcomm" and Horovod's API.

Most change tensors in place, as torch.distributed's do; `..._together` and `..._rows` return new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from clcomm.base.errors import ClcommError
from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors import background
from clcomm.comm.tensors.arrays import (
    HALVES_IN_FLOAT32,
    HostCopies,
    Together,
    array_of,
    as_tensor,
    bytes_of,
    changed,
    described,
    divide_by,
    dtype_name,
    flat,
    is_mean_of_integers,
    require_summable,
    require_usable,
)
from clcomm.comm.tensors.background import MOST_BYTES, Staging
from clcomm.comm.tensors.sharing import PersistentBuffers

_Converted = TypeVar("_Converted")


class TensorCollectives:
    """Collectives on tensors of any supported device, dtype and stride; each blocks until it is complete.

    Args:
        summed_in: the dtypes for the sums of other dtypes, which are rounded once; all others are summed in their own.
        moves_buffers: whether buffers that are reduced in several backwards move to shared memory.
    """

    def __init__(
        self,
        comm: Communicator,
        summed_in: Mapping[torch.dtype, torch.dtype] = HALVES_IN_FLOAT32,
        moves_buffers: bool = True,
    ):
        self.comm, self._summed_in, self._shares_memory = comm, summed_in, comm.shares_memory
        self.copies = HostCopies(comm.notify_phase)
        self._staging, self._lasting = Staging(comm), PersistentBuffers(comm) if moves_buffers else None

    # --- sums ---

    def all_reduce(self, tensor: torch.Tensor, op: str, label: str = "", bucket: int = -1) -> None:
        """Reduce a tensor over the ranks, in place; a mean of integers is cut towards zero.

        A tensor in shared memory is not copied; a buffer that is reduced in several backwards moves
        there. A rank that has joined (DistributedDataParallel.join) calls the others' outside of a backward, so that
        ranks compare shape and dtype instead of label and bucket.
        """
        values = self._on_host(tensor, label, bucket, in_place=True)
        self._reduce_in_place(values, op, label, bucket)
        self.copies.give_back(values, tensor, label, bucket)

    def _reduce_in_place(self, values: torch.Tensor, op: str, label: str, bucket: int = -1) -> None:
        compared = dtype_name(values.dtype) if values.dim() == 1 else described([values])
        values = flat(values)
        self._reduce(values, values, op, label, bucket, compared)

    def all_reduce_coalesced(self, tensors: Sequence[torch.Tensor], op: str) -> None:
        """Reduce several tensors of one dtype in one all-reduce."""
        values = [self._on_host(tensor) for tensor in tensors]
        if len({each.dtype for each in values}) > 1:
            self.comm.runner.refuse(
                f"tensors: expected one dtype, got {', '.join(dtype_name(each.dtype) for each in values)}"
            )
        for part, tensor in zip(self.all_reduce_together(values, op), tensors, strict=True):
            self.copies.give_back(part, tensor)

    def all_reduce_together(self, tensors: Sequence[torch.Tensor], op: str, label: str = "") -> list[torch.Tensor]:
        """Return tensors of one dtype, contiguous on the host, reduced in one all-reduce; ranks compare the label."""
        together = Together(tensors)
        self._reduce(together.values, together.reduced, op, label, -1, together.compared(label))
        return together.parts()

    def _reduce(self, source: torch.Tensor, out: torch.Tensor, op: str, label: str, bucket: int, compared: str) -> None:
        """Reduce a flat tensor on the host into `out`, which may be the source; ranks compare `compared`."""
        self._checked(require_summable, source.dtype)
        if is_mean_of_integers(op, source.dtype):
            self._reduce(source, out, "sum", label, bucket, f"{compared} for a mean")
            divide_by(self.comm.size, out)
            return
        summed = self._summed_in.get(source.dtype, source.dtype)
        call: dict[str, Any] = {"op": op, "label": label, "bucket": bucket, "compared": compared}
        if self._shares_memory and source.numel():
            self._note_and_move(source, bucket)
            self._staging.all_reduce(source, out, summed=summed, **call)
        elif summed is source.dtype:
            self.comm.all_reduce(array_of(source), out=array_of(out), **call)
            changed(out)
        else:
            wide = source.to(summed)
            self.comm.all_reduce(array_of(wide), nbytes=source.nbytes, **call)
            out.copy_(wide)

    def _note_and_move(self, values: torch.Tensor, bucket: int) -> None:
        if self._lasting is None:
            return
        if bucket >= 0:
            self._lasting.note(values)
        if self.comm.runner.sequence >= self._lasting.due:
            self._lasting.move(f"all_reduce of {values.numel():,} {dtype_name(values.dtype)}")

    def all_reduce_sparse(self, tensor: torch.Tensor, op: str) -> None:
        """Sum a sparse COO tensor over the ranks, in rank order; its indices may differ between ranks."""
        if op != "sum":
            self.comm.runner.refuse(f"op: expected sum for a sparse tensor, got {op}")
        total = background.sparse_sum(self.comm, self.copies.sparse_on_host(tensor)).wait()
        with torch.no_grad():
            tensor.copy_(self.copies.to_device_of(tensor, total))

    def reduce(self, tensor: torch.Tensor, op: str, root: int) -> None:
        """Reduce a tensor over the ranks into root's; the others' stay as they are."""
        values = self._on_host(tensor)
        if self.comm.rank != root:
            values = values.clone()
        self._reduce_in_place(values, op, "reduce")
        if self.comm.rank == root:
            self.copies.give_back(values, tensor)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str) -> None:
        """Reduce block r of the ranks' inputs into the output of rank r; inputs: one for each rank, of any lengths."""
        blocks = [flat(self._on_host(each)) for each in inputs]
        together = torch.cat(blocks) if len(blocks) > 1 else blocks[0].clone()
        self._reduce_blocks(output, self._to_sum(together), [each.numel() for each in blocks], op)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, op: str) -> None:
        """Reduce block r of the ranks' tensors into the output of rank r; world_size blocks of equal length."""
        values = flat(self._on_host(source))
        if values.numel() != output.numel() * self.comm.size:
            self.comm.runner.refuse(
                f"input: expected {self.comm.size} times the {output.numel():,} elements of output, "
                f"got {values.numel():,}"
            )
        self._reduce_blocks(output, self._to_sum(values), [output.numel()] * self.comm.size, op)

    def reduce_scatter_rows(self, tensor: torch.Tensor, op: str, label: str = "") -> torch.Tensor:
        """Return this rank's rows of the ranks' reduced tensors; see `rows_of`. tensor: contiguous on the host."""
        size, (start, stop) = self.comm.size, rows_of(len(tensor), self.comm.rank, self.comm.size)
        if len(tensor) % size or not tensor.numel():
            return self.all_reduce_together([tensor], op, label)[0][start:stop].clone()
        output = tensor.new_empty((stop - start, *tensor.shape[1:]))
        self._reduce_blocks(output, self._to_sum(flat(tensor)), [output.numel()] * size, op, label)
        return output

    def _to_sum(self, values: torch.Tensor) -> torch.Tensor:
        self._checked(require_summable, values.dtype)
        return values.to(self._summed_in.get(values.dtype, values.dtype))

    def _reduce_blocks(
        self, output: torch.Tensor, values: torch.Tensor, lengths: list[int], op: str, label: str = ""
    ) -> None:
        size, rank = self.comm.size, self.comm.rank
        self._require_usable([output])
        if is_mean_of_integers(op, values.dtype):
            self._reduce_blocks(output, values, lengths, "sum", label)
            divide_by(size, output)
            return
        if output.numel() != lengths[rank]:
            self.comm.runner.refuse(
                f"output: expected {lengths[rank]:,} elements as input {rank}, got {output.numel():,}"
            )
        if len(set(lengths)) > 1:
            whole = values.clone()
            self.comm.all_reduce(array_of(whole), op, label="reduce_scatter", compared="reduce_scatter")
            self.copies.give_back(whole.split(lengths)[rank], output)
            return
        mine = torch.empty(lengths[0], dtype=values.dtype)
        source, reduced = array_of(values).reshape(size, *output.shape), array_of(mine).reshape(1, *output.shape)
        self.comm.reduce_scatter(source, op, out=reduced, label=label, nbytes=size * output.nbytes)
        self.copies.give_back(mine.to(output.dtype), output)

    # --- copies ---

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy root's tensor into that of every rank."""
        values = self._on_host(tensor, in_place=True)
        self.comm.broadcast(array_of(values).reshape(values.shape), root)
        if self.comm.rank != root:
            self.copies.give_back(values, tensor)

    def broadcast_together(self, tensors: Sequence[torch.Tensor], root: int, label: str = "") -> list[torch.Tensor]:
        """Return root's tensors of one dtype, sent in one broadcast; every rank's: contiguous on the host."""
        whole = np.concatenate([array_of(each) for each in tensors])
        if len(tensors) == 1:
            whole = whole.reshape(tensors[0].shape)  # which ranks compare
        sent = as_tensor(self.comm.broadcast(whole, root, label=label), tensors[0])
        parts = sent.reshape(-1).split([each.numel() for each in tensors])
        return [part.reshape(each.shape) for part, each in zip(parts, tensors, strict=True)]

    def all_gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Copy rank r's tensor to output r on every rank; their shapes may differ."""
        self._require_usable(outputs)
        own, mine = self._on_host(source), outputs[self.comm.rank]
        if own.numel() != mine.numel() or own.dtype != mine.dtype:
            self.comm.runner.refuse(
                f"tensor_list[{self.comm.rank}]: expected {own.numel():,} {dtype_name(own.dtype)} as this rank's "
                f"tensor, got {mine.numel():,} {dtype_name(mine.dtype)}"
            )
        if len({each.numel() for each in outputs}) > 1:
            parts = [torch.empty(each.numel(), dtype=own.dtype) for each in outputs]
            self._exchange("all_gather", [own] * self.comm.size, parts)
        else:
            gathered = torch.empty((self.comm.size, own.numel()), dtype=own.dtype)
            self._gather_all(own if len({each.shape for each in outputs}) == 1 else flat(own), gathered)
            parts = list(gathered)
        for part, output in zip(parts, outputs, strict=True):
            self.copies.give_back(part, output)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Copy all ranks' tensors, in rank order, to one output."""
        own = self._on_host(source)
        if output.numel() != self.comm.size * own.numel() or output.dtype != own.dtype:
            self.comm.runner.refuse(
                f"output_tensor: expected {self.comm.size} times {own.numel():,} {dtype_name(own.dtype)}, "
                f"got {output.numel():,} {dtype_name(output.dtype)}"
            )
        gathered = self._checked(self.copies.room_for, output)
        self._gather_all(own, gathered)
        self.copies.give_back(gathered, output)

    def _gather_all(self, own: torch.Tensor, gathered: torch.Tensor) -> None:
        """Copy all ranks' tensors to one, of which `own` may be a part (as FullyShardedDataParallel calls it)."""
        sent = bytes_of(own)
        if self._shares_memory and 0 < sent.nbytes <= MOST_BYTES:
            pair = self._staging.pair(sent.nbytes, torch.uint8, lambda: f"all_gather of {sent.nbytes:,} bytes")
            pair.row_array[: sent.nbytes] = sent
            sent = pair.row_array[: sent.nbytes]
        elif np.may_share_memory(sent, bytes_of(gathered)):
            sent = sent.copy()
        kind = array_of(own).dtype  # which ranks compare, with the shape
        self.comm.all_gather(sent.view(kind).reshape(own.shape), out=bytes_of(gathered).view(kind))

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int) -> None:
        """Copy rank r's tensor to output r on root; the other ranks give no outputs."""
        self._require_usable(outputs)
        own = self._on_host(source)
        parts = [torch.empty(each.numel(), dtype=each.dtype) for each in outputs]
        sends = [own if rank == root else None for rank in range(self.comm.size)]
        self._exchange("gather", sends, parts or [None] * self.comm.size)
        for part, output in zip(parts, outputs, strict=True):
            self.copies.give_back(part, output)

    def scatter(self, output: torch.Tensor, sources: Sequence[torch.Tensor], root: int) -> None:
        """Copy source r of root to the output of rank r; the other ranks give no sources."""
        self._require_usable([output])
        own = [self._on_host(each) for each in sources]
        part = torch.empty(output.numel(), dtype=output.dtype)
        receives = [part if rank == root else None for rank in range(self.comm.size)]
        self._exchange("scatter", own or [None] * self.comm.size, receives)
        self.copies.give_back(part, output)

    def all_to_all(self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Send source r to rank r, and receive output r from it; shapes may differ."""
        self._require_usable(outputs)
        own = [self._on_host(each) for each in sources]
        parts = [torch.empty(each.numel(), dtype=each.dtype) for each in outputs]
        self._exchange("all_to_all", own, parts)
        for part, output in zip(parts, outputs, strict=True):
            self.copies.give_back(part, output)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_rows: Sequence[int], source_rows: Sequence[int]
    ) -> None:
        """Copy blocks of rows to and from all ranks; rows: the number of each rank's, empty for equal blocks."""
        own, received = self._on_host(source), self._checked(self.copies.room_for, output)
        sends = self._blocks("input", own, source_rows)
        self._exchange("all_to_all", sends, self._blocks("output", received, output_rows))
        self.copies.give_back(received, output)

    def all_to_all_rows(
        self, tensor: torch.Tensor, splits: Sequence[int], label: str = ""
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the other ranks' rows for this one, in rank order, and the number from each.

        tensor: contiguous on the host. splits: the number of its rows for each rank, all of them in sum.
        """
        kind = f"{label} {described([tensor[:0]])}".lstrip()
        counts = self.comm.all_gather(np.array(splits, np.int64), label=kind)[:, self.comm.rank].tolist()
        found = tensor.new_empty((sum(counts), *tensor.shape[1:]))
        self._exchange("all_to_all", tensor.split(list(splits)), found.split(counts), label)
        return found, counts

    def _blocks(self, name: str, values: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
        size, length = self.comm.size, values.shape[0] if values.dim() else values.numel()
        if not rows and length % size:
            self.comm.runner.refuse(f"{name}: expected a first dimension that {size} ranks divide, got {length}")
        if rows and (len(rows) != size or sum(rows) != length):
            self.comm.runner.refuse(
                f"{name}_split_sizes: expected {size} sizes whose sum is {length}, got {list(rows)}"
            )
        return list(values.split(list(rows) or [length // size] * size)) if length else [values] * size

    def _exchange(
        self,
        operation: str,
        sends: Sequence[torch.Tensor | None],
        receives: Sequence[torch.Tensor | None],
        label: str = "",
    ) -> None:
        dtype = next(each.dtype for each in (*sends, *receives) if each is not None)
        nothing = array_of(torch.empty(0, dtype=dtype))

        def arrays(tensors: Sequence[torch.Tensor | None]) -> list[np.ndarray]:
            return [nothing if each is None else array_of(each) for each in tensors]

        self.comm.all_to_all(arrays(sends), arrays(receives), label=label, operation=operation)

    def barrier(self) -> None:
        self.comm.barrier()

    # --- checks, whose errors are raised on every rank ---

    def _on_host(self, tensor: torch.Tensor, label: str = "", bucket: int = -1, in_place: bool = False) -> torch.Tensor:
        return self._checked(lambda each: self.copies.on_host(each, label, bucket, in_place), tensor)

    def _require_usable(self, outputs: Sequence[torch.Tensor]) -> None:
        for each in outputs:
            self._checked(require_usable, each)

    def _checked(self, convert: Callable[[Any], _Converted], value: object) -> _Converted:
        """Return the converted value; an error on one rank is raised on all."""
        try:
            return convert(value)
        except ClcommError as error:
            self.comm.runner.refuse(str(error))


def rows_of(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the range of rows of a rank, out of `length`; the first ranks get one more each of the remainder."""
    least, more = divmod(length, ranks)
    return rank * least + min(rank, more), (rank + 1) * least + min(rank + 1, more)
