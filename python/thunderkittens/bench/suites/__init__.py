"""One module per op: its cases, its peers, and the tiny calls whose host time is taken.

A suite has `SHAPES` (the names `cases` knows), `CHOICES` where only this op has some (`Names` and
`Flag` of `choices`), `cases(shapes, *, dtype, **options)`, where `shapes` is one of these names or
a list of sizes, `OF_MODEL` (the function of `models` that makes such sizes),
`implementations(device)` and `host_calls(device)`: calls without arguments by their names, or, of
an op with a gradient, each a `Differentiable`.
"""
