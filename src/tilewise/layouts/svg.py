"""Scene as SVG, without a library."""

from __future__ import annotations

from xml.sax.saxutils import escape

from tilewise.layouts.figure import Arrow, Box, Scene, Words

FONT = "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\""


def to_svg(scene: Scene) -> str:
    """Return the SVG text."""
    size = f'width="{scene.width:g}" height="{scene.height:g}" viewBox="0 0 {scene.width:g} {scene.height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT} role="img"><title>{escape(scene.title)}</title>'
    marker = (
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 6 3 0 6z" fill="#6b7280"/></marker></defs>'
    )
    return "\n".join([head, marker, *map(_shape, scene.shapes), "</svg>\n"])


def _shape(shape: Box | Words | Arrow) -> str:
    if isinstance(shape, Box):
        place = f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"'
        opacity = "" if shape.opacity == 1 else f' fill-opacity="{shape.opacity:g}"'
        stroke = "" if shape.stroke == "none" else f' stroke="{shape.stroke}" stroke-width="{shape.stroke_width:g}"'
        return f'<rect {place} fill="{shape.fill}"{stroke}{opacity}/>'
    if isinstance(shape, Arrow):
        ends = f'x1="{shape.x1:g}" y1="{shape.y1:g}" x2="{shape.x2:g}" y2="{shape.y2:g}"'
        return f'<line {ends} stroke="{shape.color}" stroke-width="1.5" marker-end="url(#tip)"/>'
    weight = ' font-weight="bold"' if shape.bold else ""
    anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
    place = f'x="{shape.x:g}" y="{shape.y:g}" font-size="{shape.size:g}" fill="{shape.color}"'
    return f"<text {place}{anchor}{weight}>{escape(shape.text)}</text>"
