"""The plot of predicted against measured, of groups whose names come from a table."""

from __future__ import annotations

from xml.etree import ElementTree

from trainspec_cli.report.backtest import render_scatter


def test_names_are_text_alone() -> None:
    hostile = "<script>alert(1)</script>\"'&\x1b]0;owned\x07\u202e"
    drawn = render_scatter([(1.0, 1.1, hostile), (2.0, 2.1, "plain")])
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    assert "<script>alert(1)</script>\"'&\\x1b]0;owned\\x07\\u202e" in texts
    assert "<script" not in drawn
