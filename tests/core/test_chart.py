"""Charts of characters, held against ones drawn by hand."""

from training.core.chart import bar, bars, sparkline


def test_the_curve_falls_with_the_values():
    assert sparkline([8.0, 4.0, 2.0, 1.0], width=4) == "█▄▂▁"
    assert sparkline([]) == "" and len(sparkline([1.0] * 100)) == 40


def test_a_bar_is_exact_to_an_eighth_and_never_hides_what_is_there():
    assert bar(1.0, 4) == "████" and bar(0.5, 3) == "█▌" and bar(0.0, 4) == ""
    assert bar(1e-9, 10) == "▏"


def test_bars_share_one_scale_and_one_margin():
    assert bars([("a", 2, "two"), ("long", 1, "one")], width=4) == ["   a ████ two", "long ██   one"]
    assert bars([]) == [] and bars([("a", 0, "none")], width=2) == ["a    none"]
