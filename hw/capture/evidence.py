"""Which evidence decides what a kernel does with a pointer: the table of precedence, as one function.

    row  the pointer lies in                      known besides             mode                evidence
    1    anything                                 copy or set of the graph  the node's own      params
    2    an argument of an Inductor kernel        PTX within the names      by the names        schema
    3    an argument of an Inductor kernel        PTX beyond the names      both                ptx, warning
    4    an argument of an operator               PTX within the schema     by PTX              ptx
    5    an argument of an operator               PTX beyond the schema     both                ptx, warning
    6    an argument of a Triton kernel           PTX                       by PTX              ptx
    7    an argument of anything                  PTX that gives up         RW, extent unknown  params, warning
    8    an argument of an operator               a known library kernel    schema and its row  library
    9    an argument of an Inductor kernel or op  nothing                   names or schema     schema
    10   an argument of a Triton kernel           nothing                   RW                  params
    11   no argument                              PTX                       by PTX              ptx
    12   no argument                              a known library kernel    its workspace       library
    13   no argument                              nothing                   RW                  params

A result that an earlier kernel of the call has begun may be read by a later one: PTX decides, else a known
library kernel, else it is RW. A kernel that touches memory which none of its parameters names has accesses of
evidence `unknown`, and so has one that no call explains and whose pointers lead to no known buffer: the graph
keeps both with their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from hw.capture.library import LibraryKernel
from hw.capture.ptx_evidence import union, within

#: Where the declared mode of an argument comes from.
NAMES, SCHEMA, NOWHERE = "names", "schema", "nowhere"


@dataclass(frozen=True)
class Decision:
    """Mode of one pointer in one kernel."""

    mode: str  # none | R | W | RW
    evidence: str
    widened: bool = False  # PTX does what the declaration does not allow
    vague: bool = False  # nothing bounds where in the buffer

    @property
    def writes(self) -> bool:
        return "W" in self.mode

    @property
    def reads(self) -> bool:
        return "R" in self.mode


def decide(
    declared: str | None, source: str = NOWHERE, *, ptx: str | None = None, node: str | None = None,
    library: LibraryKernel | None = None, begun: bool = False,
) -> Decision:  # fmt: skip
    """Mode and evidence of a pointer.

    `declared`: R, W or RW of the argument that explains it (None: none does), from `source`; `ptx`: none, R, W,
    RW or unknown; `node`: mode of a copy or set; `begun`: an earlier kernel of the call has written it.
    """
    if node is not None:
        return Decision(node, "params")
    if declared is not None and source == NOWHERE:
        declared, undeclared = "RW", True
    else:
        undeclared = False
    if ptx == "unknown":
        return Decision("RW", "params", widened=declared is not None and not undeclared, vague=True)
    if ptx is not None:
        if declared is None or undeclared:
            return Decision(ptx, "ptx")
        allowed = union(declared, "R") if begun else declared
        if not within(ptx, allowed):
            return Decision(union(ptx, declared), "ptx", widened=True)
        return Decision(declared, "schema") if source == NAMES else Decision(ptx, "ptx")
    if declared is None:
        return Decision(library.workspace, "library") if library else Decision("RW", "params")
    if undeclared:
        return Decision("RW", "params")
    if declared == "W" and library is not None and (begun or library.result == "none"):
        return Decision(library.result, "library")
    if declared == "W" and begun:
        return Decision("RW", "params")
    return Decision(declared, "library" if library else "schema")
