"""What a computed row can turn out to be, and how it looks: one table for the page, the terminal,
the reports and the benches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowKind:
    """One kind of row. The two colours differ for every kind of colour vision; the pattern is the
    second sign, for who sees no colour at all.
    """

    #: Its field in `records.STEP_DTYPE`, and its key wherever rows are counted.
    name: str
    #: What people read.
    label: str
    #: What it means, in one sentence.
    meaning: str
    #: True for work that somebody asked for; False for waste.
    useful: bool
    #: Its colour as #rrggbb, on a light ground.
    light: str
    #: The same on a dark ground.
    dark: str
    #: Plotly's pattern that is laid over the colour; "" for a plain area.
    pattern: str
    #: Its style in a terminal, in rich's words.
    terminal: str


#: Every kind by its name, in the order of `records.ROW_KINDS`: useful work first.
ROW_KIND_TABLE: dict[str, RowKind] = {
    kind.name: kind
    for kind in (
        RowKind(
            name="prefill",
            label="prompt",
            meaning="A prompt token, read for the first time.",
            useful=True,
            light="#e69f00",
            dark="#f0b429",
            pattern="",
            terminal="yellow",
        ),
        RowKind(
            name="decode",
            label="generated",
            meaning="A row that brought a token of an answer.",
            useful=True,
            light="#0072b2",
            dark="#56b4e9",
            pattern="",
            terminal="green",
        ),
        RowKind(
            name="padding",
            label="padding",
            meaning="An empty row: the step was as long as the compiled size above it.",
            useful=False,
            light="#8d99a6",
            dark="#7d8a98",
            pattern="/",
            terminal="bright_black",
        ),
        RowKind(
            name="recomputed",
            label="recomputed",
            meaning="A token computed again, because its sequence had lost its pages.",
            useful=False,
            light="#b0558a",
            dark="#e29ac0",
            pattern="x",
            terminal="magenta",
        ),
        RowKind(
            name="past_end",
            label="past the end",
            meaning="A row of a sequence that had ended in the step before.",
            useful=False,
            light="#c2410c",
            dark="#ff9a6b",
            pattern=".",
            terminal="red",
        ),
        RowKind(
            name="cancelled",
            label="cancelled",
            meaning="A row of a sequence whose client had left.",
            useful=False,
            light="#17202a",
            dark="#eaf0f6",
            pattern="\\",
            terminal="red",
        ),
    )
}
