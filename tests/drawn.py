"""Where a drawing's file has its texts: their boxes, from the places in the file and the width of a mean character."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

SVG = "{http://www.w3.org/2000/svg}"
#: Pixels: a mean character of a sans-serif font of 13 pixels, and the part of a line above and below its foot.
CHARACTER, ABOVE, BELOW = 6.8, 8.0, 1.5


class Box(NamedTuple):
    """The text and its box, in pixels of the picture."""

    words: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def texts_of(file: Path) -> list[Box]:
    """Return the boxes of a file's texts, after checking that none overlap or leave the picture."""
    root = ElementTree.parse(file).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [box for box in _texts(root, 0.0, 0.0, width) if box.words]
    assert not [(one, other) for one, other in combinations(boxes, 2) if one.overlaps(other)]
    assert [box for box in boxes if box.left < 0 or box.right > width or box.top < 0 or box.bottom > height] == []
    return boxes


def _texts(within: ElementTree.Element, left: float, top: float, width: float) -> Iterator[Box]:
    for each in within:
        if each.tag == f"{SVG}svg" and "x" in each.attrib:
            x, y, across = (float(each.attrib[name]) for name in ("x", "y", "width"))
            yield from _texts(each, left + x, top + y, across)
        elif each.tag == f"{SVG}text":
            words = each.text or ""
            long = CHARACTER * len(words)
            x = left + width * float(each.attrib["x"].rstrip("%")) / 100 + float(each.attrib.get("dx", 0))
            x -= {"start": 0.0, "middle": long / 2, "end": long}[each.attrib["text-anchor"]]
            y = top + float(each.attrib["y"])
            yield Box(words, x, y - ABOVE, x + long, y + BELOW)
