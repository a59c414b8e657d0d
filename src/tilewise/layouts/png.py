"""Scene as PNG, drawn by matplotlib, which is imported only to write a picture."""

from __future__ import annotations

from pathlib import Path

from tilewise.layouts.figure import Arrow, Box, Scene

PIXELS_PER_INCH, DPI = 96, 192  # pixels of a scene, dots of the file
ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def write_png(scene: Scene, path: Path) -> None:
    """Write the file ``path``; raise ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    picture = Figure(figsize=(scene.width / PIXELS_PER_INCH, scene.height / PIXELS_PER_INCH), dpi=DPI)
    FigureCanvasAgg(picture)
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    points = 72 / PIXELS_PER_INCH
    for shape in scene.shapes:
        if isinstance(shape, Box):
            line = 0 if shape.stroke == "none" else shape.stroke_width * points
            axes.add_patch(
                Rectangle(
                    (shape.x, shape.y), shape.width, shape.height, facecolor=shape.fill,
                    edgecolor=shape.stroke, linewidth=line, alpha=None if shape.opacity == 1 else shape.opacity,
                )
            )  # fmt: skip
        elif isinstance(shape, Arrow):
            style = {"arrowstyle": "->", "color": shape.color, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (shape.x2, shape.y2), (shape.x1, shape.y1), arrowprops=style)
        else:
            axes.text(
                shape.x, shape.y, shape.text, fontsize=shape.size * points, color=shape.color,
                ha=ANCHORS[shape.anchor], va="baseline", fontweight="bold" if shape.bold else "normal",
            )  # fmt: skip
    picture.savefig(path, format="png")
