"""Counts the bytes that a compiled program's instructions move, their operations, and their large
results.

An instruction reads each operand and writes each result once. For gathers, slices and scatters only
the rows in question count, also inside a fusion. Our kernels move the bytes that their
documentation states (`kernel_cost`); cached re-reads and the workspaces of libraries are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from hlo import Array, Computation, Instruction, Module

#: Instructions that only name, regroup or wait, and move no bytes.
FREE = {
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "after-all",
    "optimization-barrier",
    "partition-id",
    "replica-id",
    "copy-done",
    "async-done",
    "async-update",
    "all-reduce-done",
    "all-gather-done",
    "collective-permute-done",
    "add-dependency",
    "domain",
    "slice-done",
    "dynamic-slice-done",
    "call-update",
    "call-done",
    "custom-call-start",
    "custom-call-done",
}
#: Instructions through which a fusion reads element by element.
THROUGH = {"bitcast", "reshape", "convert", "copy", "transpose"}
SLICES = {"slice", "dynamic-slice", "gather"}
STARTS = {
    "copy-start": 0,
    "slice-start": 1,
    "dynamic-slice-start": 1,
}  # index of the new array in the result
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand with the new rows
PRODUCTS = "__cublas$"
#: Custom calls that are only hints for the compiler.
HINTS = {"AssumeGatherIndicesInBound", "ConcatBitcast"}
#: (kernel name, arrays taken, arrays made) -> (bytes, operations).
KernelCost = Callable[[str, list[Array], list[Array]], tuple[float, float]]


@dataclass
class Account:
    """Bytes and operations of one run of a computation. made: name and array of each large result
    in main memory.
    """

    bytes: float = 0.0
    operations: float = 0.0
    kernels: dict[str, int] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)  # instruction -> bytes
    made: list[tuple[str, Array]] = field(default_factory=list)
    collectives: float = 0.0  # bytes that all-reduces and all-gathers read

    def add(self, other: Account, times: int = 1) -> None:
        """Join another account, run `times` times."""
        self.bytes += times * other.bytes
        self.operations += times * other.operations
        self.collectives += times * other.collectives
        for name, count in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0) + times * count
        for name, moved in other.moved.items():
            self.moved[name] = self.moved.get(name, 0.0) + times * moved
        self.made += other.made


def account(module: Module, kernel_cost: KernelCost, rounds: int = 1) -> Account:
    """The account of one run of the program. Of a conditional, the branch that moves least counts:
    that of steps in which no request uses the feature. rounds: trip count of loops over the step's
    rows.
    """
    return Reader(module, kernel_cost, rounds).computation(module.entry)


@dataclass(frozen=True)
class Reader:
    """Walks a module's computations."""

    module: Module
    kernel_cost: KernelCost
    rounds: int = 1

    def computation(self, which: Computation) -> Account:
        """The account of all instructions of a computation that is not fused: the entry, a branch,
        a loop's body.
        """
        total = Account()
        for made in which.instructions.values():
            if made.op not in FREE:
                total.add(self.instruction(which, made))
        return total

    def instruction(self, where: Computation, made: Instruction) -> Account:
        """The account of one instruction, including the computations that it calls."""
        match made.op:
            case "while":
                return self.loop(made)
            case "conditional":
                return self.conditional(made)
            case "call":
                return self.computation(self.module.called(made, "to_apply"))
            case "call-start":  # an all-reduce on a TPU's SparseCores
                return self.computation(self.module.called(made, "to_apply"))
            case "async-start":
                return self.computation(self.module.called(made))
            case "custom-call":
                return self.custom_call(where, made)
            case "fusion":
                return self.fusion(made)
            case (
                "custom-call-update"
            ):  # a TPU's scatter into its first operand, by a separate processor
                rows = 2 * sum(source.nbytes for source in where.inputs(made)[2:])
                return Account(rows, moved={made.name: rows})
        moved = self.moved(where, made)
        link = sum(
            array.elements * array.itemsize
            for source in where.inputs(made)
            for array in source.arrays
        )
        return Account(
            moved,
            operations(where, made),
            moved={made.name: moved},
            made=results(made, made.op in UPDATES),
            collectives=link * made.op.startswith("all-"),
        )

    def moved(self, where: Computation, made: Instruction) -> float:
        """Bytes of an instruction that is not fused."""
        sources = where.inputs(made)
        if made.op in STARTS:
            target = made.arrays[STARTS[made.op]]
            return target.nbytes + sources[0].nbytes * target.elements / max(
                sources[0].arrays[0].elements, 1
            )
        if made.op in SLICES:
            return (
                made.nbytes
                + sum(source.nbytes for source in sources[1:])
                + rows_of(sources[0], made)
            )
        if made.op in UPDATES:
            new = sources[UPDATES[made.op]].nbytes
            return 2 * new + sum(source.nbytes for source in sources[1:]) - new
        return made.nbytes + sum(source.nbytes for source in sources)

    def fusion(self, made: Instruction) -> Account:
        """The account of a fusion: operands by their use, results by the root; a fusion around a
        kernel counts as the kernel.
        """
        inner = self.module.called(made)
        if any(
            part.op == "custom-call" and not is_hint(part) for part in inner.instructions.values()
        ):
            return self.computation(inner)
        moved = sum(self.read(inner, parameter) for parameter in inner.parameters) + self.written(
            inner
        )
        done = sum(self.fused_operations(inner))
        return Account(
            moved,
            done,
            moved={made.name: moved},
            made=results(made, self.written(inner) < made.nbytes),
        )

    def fused_operations(self, inner: Computation) -> list[float]:
        """Operations of each instruction inside a fusion."""
        counts = []
        for part in inner.instructions.values():
            nested = self.fused_operations(self.module.called(part)) if part.op == "fusion" else []
            counts.append(operations(inner, part) + sum(nested))
        return counts

    def read(self, inner: Computation, source: Instruction) -> float:
        """Bytes that a fusion reads of one of its parameters, or of a regrouped parameter."""
        total = 0.0
        for user in inner.users[source.name]:
            first = user.operands[0] == source.name
            if user.op in THROUGH:
                total += self.read(inner, user) * source_scale(source, user)
            elif user.op in SLICES and first:
                total += rows_of(source, user)
            elif user.op == "fusion":
                nested = self.module.called(user)
                total += sum(
                    self.read(nested, parameter)
                    for parameter, name in zip(nested.parameters, user.operands, strict=True)
                    if name == source.name
                )
            elif user.op == "tuple" or not (user.op in UPDATES and first):
                total += source.nbytes
        if source.root and source.op in THROUGH:
            total += source.nbytes
        return min(total, source.nbytes)

    def written(self, inner: Computation) -> float:
        """Bytes that a fusion writes: only rows if its root updates an operand in place."""
        roots = inner.inputs(inner.root) if inner.root.op == "tuple" else [inner.root]
        total = 0.0
        for root in roots:
            while root.op == "bitcast":
                root = inner.inputs(root)[0]
            if root.op in UPDATES:
                new = inner.inputs(root)[UPDATES[root.op]]
                total += (
                    0.0
                    if root.arrays[0].space
                    else sum(a.elements * a.itemsize for a in new.arrays)
                )
            elif root.op == "fusion":
                total += self.written(self.module.called(root))
            else:
                total += root.nbytes
        return total

    def loop(self, made: Instruction) -> Account:
        """The account of a loop: its body times the trip count known to XLA, or times `rounds`."""
        total = Account()
        count = re.search(r'"known_trip_count":\{"n":"(\d+)"', made.attributes)
        total.add(
            self.computation(self.module.called(made, "body")),
            int(count.group(1)) if count else self.rounds,
        )
        return total

    def conditional(self, made: Instruction) -> Account:
        """The account of the branch that moves least."""
        names = re.search(r"branch_computations=\{([^}]*)\}", made.attributes)
        branches = (
            re.findall(r"%?([\w.\-]+)", names.group(1))
            if names
            else [made.calls("true_computation"), made.calls("false_computation")]
        )
        return min(
            (self.computation(self.module.computations[name]) for name in branches),
            key=lambda a: a.bytes,
        )

    def custom_call(self, where: Computation, made: Instruction) -> Account:
        """The account of a library's product, or of our kernel by `kernel_cost`."""
        if is_hint(made):
            return Account()
        operands = [array for source in where.inputs(made) for array in source.arrays]
        if made.quoted("custom_call_target").startswith(
            PRODUCTS
        ):  # its second result is a workspace
            result = made.arrays[0]
            moved = result.nbytes + sum(array.nbytes for array in operands)
            return Account(moved, library_operations(made, operands), moved={made.name: moved})
        name = kernel_name(made)
        moved, done = self.kernel_cost(name, operands, list(made.arrays))
        return Account(moved, done, kernels={name: 1}, moved={made.name: moved})


def is_hint(made: Instruction) -> bool:
    """Whether a custom call is a hint, which moves no bytes."""
    return made.quoted("custom_call_target") in HINTS


def kernel_name(made: Instruction) -> str:
    """The name of the kernel that a custom call runs: the scope in which its launch is traced, else
    the call's target.
    """
    scopes = made.quoted("op_name").split("/")
    if scopes[-1] in ("triton_kernel_call", "pallas_call", "tpu_custom_call") and len(scopes) > 1:
        return scopes[-2]
    return made.quoted("custom_call_target")


def rows_of(source: Instruction, made: Instruction) -> float:
    """Bytes of the elements that a slice or gather takes from its source."""
    array = source.arrays[0]
    return (
        0.0
        if array.space
        else min(sum(a.elements for a in made.arrays), array.elements) * array.itemsize
    )


def source_scale(source: Instruction, made: Instruction) -> float:
    """Bytes read of a source for each byte of an element-wise result."""
    if not made.arrays[0].itemsize or made.arrays[0].space:
        return 1.0
    return source.arrays[0].itemsize / made.arrays[0].itemsize


def results(made: Instruction, in_place: bool) -> list[tuple[str, Array]]:
    """The arrays that an instruction makes anew in main memory."""
    arrays = [made.arrays[STARTS[made.op]]] if made.op in STARTS else made.arrays
    return (
        []
        if in_place
        else [(made.name, array) for array in arrays if not array.space and array.elements]
    )


def operations(where: Computation, made: Instruction) -> float:
    """Operations of a matrix product, written as a dot or, for a TPU, as a convolution: two for
    each multiplication.
    """
    if made.op == "dot":
        left = where.inputs(made)[0].arrays[0]
        return (
            2.0
            * made.arrays[0].elements
            * math.prod(left.dims[d] for d in made.numbers("lhs_contracting_dims"))
        )
    if made.op == "convolution":
        labels = re.search(r"dim_labels=\w+_(\w+)->", made.attributes)
        kernel = where.inputs(made)[1].arrays[0]
        outputs = kernel.dims[labels.group(1).index("o")] if labels else 1
        return 2.0 * made.arrays[0].elements * kernel.elements / outputs
    return 0.0


def library_operations(made: Instruction, taken: list[Array]) -> float:
    """Operations of a library's product, from the dimension numbers in its configuration."""
    text = re.search(r"backend_config=(\{.*\})", made.attributes)
    config = json.loads(text.group(1)).get("gemm_backend_config", {}) if text else {}
    dims = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
    return 2.0 * made.arrays[0].elements * math.prod(taken[0].dims[int(d)] for d in dims)
