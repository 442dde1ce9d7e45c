from __future__ import annotations

from pathlib import Path

from composer.report.spi import el, static_page


def test_a_static_page_has_the_style_and_no_scripts(tmp_path: Path) -> None:
    page = static_page("A & B", [el("h1", "A & B")], tmp_path / "new" / "page.html")

    text = page.read_text()
    assert "<title>A &amp; B</title>" in text
    assert "<h1>A &amp; B</h1>" in text
    assert "--accent" in text
    assert "script-src 'none'" in text
    assert "<script" not in text
    assert "<noscript" not in text
    assert "$" not in text.split("</style>")[1]
