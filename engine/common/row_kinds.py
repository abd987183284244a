"""Kinds of computed rows with their labels and colours, for page, terminal, reports and benches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowKind:
    """A kind of row. Its colours are distinct for all colour vision, its pattern without any."""

    #: Its field in `records.STEP_DTYPE` and its key in counts.
    name: str
    #: Name shown to people.
    label: str
    #: One sentence.
    meaning: str
    #: False for waste.
    useful: bool
    #: Colour as #rrggbb on a light background.
    light: str
    #: Colour on a dark background.
    dark: str
    #: Plotly's pattern over the colour; "": none.
    pattern: str
    #: rich's style in a terminal.
    terminal: str


#: All kinds by name, in the order of `records.ROW_KINDS`: useful work first.
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
            name="accepted",
            label="right draft",
            meaning="A row that read a drafted token, which the model chose.",
            useful=True,
            light="#117a43",
            dark="#4fd08a",
            pattern="",
            terminal="bright_green",
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
        RowKind(
            name="rejected",
            label="wrong draft",
            meaning="A row that read a drafted token, which the model did not choose.",
            useful=False,
            light="#5b3fa0",
            dark="#b9a3f0",
            pattern="|",
            terminal="bright_magenta",
        ),
    )
}
