"""Charts of characters, held against ones drawn by hand."""

from training.core.chart import bar, bars, curves, sparkline


def test_the_curve_falls_with_the_values():
    assert sparkline([8.0, 4.0, 2.0, 1.0], width=4) == "█▄▂▁"
    assert sparkline([]) == "" and len(sparkline([1.0] * 100)) == 40


def test_a_bar_is_exact_to_an_eighth_and_never_hides_what_is_there():
    assert bar(1.0, 4) == "████" and bar(0.5, 3) == "█▌" and bar(0.0, 4) == ""
    assert bar(1e-9, 10) == "▏"


def test_bars_share_one_scale_and_one_margin():
    assert bars([("a", 2, "two"), ("long", 1, "one")], width=4) == ["   a ████ two", "long ██   one"]
    assert bars([]) == [] and bars([("a", 0, "none")], width=2) == ["a    none"]


def test_curves_share_their_axes_and_each_has_a_mark():
    lines = curves([("a", [0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0]), ("b", [3], [4.0]), ("none", [], [])], width=4, height=4)
    assert lines == [
        "  4 ┤•  ×",
        "    ┤ •",
        "2.5 ┤  •",
        "  1 ┤   •",
        "    └────",
        "     0  3",
        "• a  × b",
    ]
    assert curves([]) == [] and curves([("a", [], [])]) == []


def test_a_column_of_a_curve_is_the_mean_and_one_point_is_a_curve():
    assert curves([("a", [0, 1, 2, 3], [0.0, 8.0, 4.0, 4.0])], width=2, height=3)[1] == "4 ┤••"
    assert curves([("a", [5], [1.0])], width=3, height=2)[1] == "1 ┤•"
