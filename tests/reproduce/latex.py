"""The tables of the paper's LaTeX, numbered as its counters print them."""

from __future__ import annotations

import re

Table = list[list[str]]

_TABLE = re.compile(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", re.DOTALL)
_RESET = r"\setcounter{table}{0}"


def printed_tables(text: str) -> dict[str, Table]:
    """By printed number: 1, 2, … in the body, A1, A2, … after the counter is set back."""
    text = re.sub(r"(?<!\\)%.*", "", text)
    body, appendix = text.split(_RESET)
    found = {str(number): _rows(table) for number, table in enumerate(_TABLE.findall(body), 1)}
    return found | {f"A{number}": _rows(table) for number, table in enumerate(_TABLE.findall(appendix), 1)}


def _rows(table: str) -> Table:
    inside = table[table.index(r"\begin{tabular}") : table.rindex(r"\end{tabular}")]
    inside = re.sub(r"\\begin\{tabular\}\[c\]\{@\{\}c@\{\}\}(.*?)\\end\{tabular\}", _one_line, inside, flags=re.DOTALL)
    rows = [[_plain(cell) for cell in row.split("&")] for row in inside.split(r"\\")]
    return [row for row in rows if len(row) > 1]


def _one_line(match: re.Match[str]) -> str:
    return match[1].replace(r"\\", " ")


def _plain(cell: str) -> str:
    """A cell without its markup."""
    cell = re.sub(r"\\cellcolor\[HTML\]\{\w+\}|\\cite\{[^}]*\}|\\Xhline\{[^}]*\}|\\hline|\$\^\\dagger\$", " ", cell)
    cell = re.sub(r"\\multirow\{[^}]*\}\{\*\}", " ", cell)
    cell = re.sub(r"\\text(?:bf)?\{([^}]*)\}", r"\1", cell)
    cell = cell.replace(r"\%", "%").replace("$^2$", "²").replace("$", "").replace("_", "")
    return " ".join(re.sub(r"[{}]", "", cell).split())
