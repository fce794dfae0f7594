"""Tables in plain text, as literal input and output."""

from __future__ import annotations

from internvl_pack.commands._table import table


def test_numbers_stand_at_the_right_and_texts_at_the_left():
    assert table(["name", "samples", "first"], [["a", "1", "x"], ["bcdefg", "12,000", ""]], left=(0, 2)) == (
        "name    samples  first\n"
        "------  -------  -----\n"
        "a             1  x\n"
        "bcdefg   12,000"
    )  # fmt: skip


def test_a_cell_of_several_lines_keeps_its_column():
    assert table(["reason", "n", "first"], [["bad", "2", "one\ntwo"], ["odd", "1", "three"]], left=(0, 2)) == (
        "reason  n  first\n"
        "------  -  -----\n"
        "bad     2  one\n"
        "           two\n"
        "odd     1  three"
    )  # fmt: skip


def test_wide_letters_take_two_places_and_controls_are_not_obeyed():
    assert table(["name", "n"], [["图表", "1"], ["e\u0301", "2"], ["\x1b[31m", "3"]]) == (
        "name   n\n"
        "-----  -\n"
        "图表   1\n"
        "e\u0301      2\n"
        "?[31m  3"
    )  # fmt: skip
