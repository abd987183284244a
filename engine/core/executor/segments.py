"""Segments: a model's program, cut between layers into programs that run one after another, so that
another step can run between two of them.

The program is traced once and its equations are divided; models know nothing of it. A segment takes
all weights and caches, of which it reads those of its own layers, and all other values that were
computed before and are read later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jax
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

#: Name of the function that runs a layer (`jitney.engine.core.models.llama`).
_LAYER = "_run_block"


@dataclass(frozen=True)
class Segments:
    """A model's program, a function (leaves, kv, *rest) -> (kv, output), cut into `count` segments
    of about as many layers each. Every cache is one array, which each of its layers replaces.

    The first segment takes (leaves, kv, *rest), each other one (leaves, kv, carried); all but the
    last return (kv, carried), which is a list, and the last one (kv, output). kv is donated.
    """

    program: Callable[..., tuple[list[Array], Any]]
    #: Shapes of (leaves, kv, *rest).
    args: tuple[Any, ...]
    count: int

    def lower(self, number: int) -> jax.stages.Lowered:
        """Lower a segment."""
        first, last = self._bounds[number : number + 2]
        args = self.args
        if number:
            carried = [cast(Any, var).aval for var in self._carried(first)]
            shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in carried]
            args = *args[:2], shapes

        def segment(*values: Any) -> tuple[list[Array], Any]:
            closed, (_, results) = self._traced
            known = dict(zip(self._whole.constvars, closed.consts, strict=True))
            known |= zip(self._inputs(first), jax.tree.leaves(values), strict=True)
            _evaluate(self._equations[first:last], known)
            kv = [known[cache] for cache in self._caches(last)]
            if last < len(self._equations):
                return kv, [known[var] for var in self._carried(last)]
            output = [_value(atom, known) for atom in self._whole.outvars[len(kv) :]]
            return kv, jax.tree.unflatten(jax.tree.structure(results), output)

        return jax.jit(segment, donate_argnums=1).lower(*args)

    @cached_property
    def _traced(self) -> tuple[ClosedJaxpr, Any]:
        """The whole program, and the shapes of its results."""
        return jax.make_jaxpr(self.program, return_shape=True)(*self.args)

    @property
    def _whole(self) -> Jaxpr:
        """The whole program; caches are the first of its results."""
        return self._traced[0].jaxpr

    @property
    def _equations(self) -> list[JaxprEqn]:
        return self._whole.eqns

    @cached_property
    def _bounds(self) -> list[int]:
        """Index of the first equation of each segment, and the number of equations."""
        layers = [
            at for at, each in enumerate(self._equations) if each.params.get("name") == _LAYER
        ]
        inner = [layers[len(layers) * number // self.count] for number in range(1, self.count)]
        return [0, *inner, len(self._equations)]

    @cached_property
    def _made_at(self) -> dict[Var, int]:
        """Index of the equation that computes each variable."""
        return {var: at for at, each in enumerate(self._equations) for var in each.outvars}

    def _inputs(self, bound: int) -> list[Var]:
        """The arguments of the segment that begins with the equation `bound`."""
        arguments = self._whole.invars
        if not bound:
            return arguments
        n_leaves = len(jax.tree.leaves(self.args[0]))
        return [*arguments[:n_leaves], *self._caches(bound), *self._carried(bound)]

    def _caches(self, bound: int) -> list[Var]:
        """The caches as they are before the equation `bound`."""
        n_caches = len(jax.tree.leaves(self.args[1]))
        return [self._before(cast(Var, cache), bound) for cache in self._whole.outvars[:n_caches]]

    def _before(self, cache: Var, bound: int) -> Var:
        """A cache as it is before the equation `bound`: the layer that replaces it has one argument
        of its shape.
        """
        while self._made_at.get(cache, -1) >= bound:
            layer = self._equations[self._made_at[cache]]
            (cache,) = {var for var in _variables(layer.invars) if var.aval == cache.aval}
        return cache

    def _carried(self, bound: int) -> list[Var]:
        """The variables that are known before the equation `bound` and read after it, without
        weights and caches.
        """
        n_leaves = len(jax.tree.leaves(self.args[0]))
        whole = self._whole
        passed = {*whole.constvars, *whole.invars[:n_leaves], *self._caches(bound)}
        n_caches = len(jax.tree.leaves(self.args[1]))
        read = [atom for each in self._equations[bound:] for atom in each.invars]
        known = dict.fromkeys(_variables([*read, *whole.outvars[n_caches:]]))
        return [var for var in known if var not in passed and self._made_at.get(var, -1) < bound]


def _variables(atoms: Iterable[Var | Literal]) -> Iterator[Var]:
    return (atom for atom in atoms if not isinstance(atom, Literal))


def _value(atom: Var | Literal, known: dict[Var, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else known[atom]


def _evaluate(equations: Iterable[JaxprEqn], known: dict[Var, Any]) -> None:
    """Trace these equations again, and add their results to the known values."""
    for equation in equations:
        inputs = [_value(atom, known) for atom in equation.invars]
        params: Any = equation.primitive.get_bind_params(equation.params)
        with equation.ctx.manager:
            results = equation.primitive.bind(*inputs, **params)
        if not equation.primitive.multiple_results:
            results = [results]
        known |= zip(equation.outvars, results, strict=True)
