// Measures a page that lies in a frame of a given width, and writes what it found, as JSON, into this document.
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow;
  const all = (what) => [...page.querySelectorAll(what)];
  const boxes = (what) => all(what).map((element) => element.getBoundingClientRect());
  const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
  const luminance = (colour) => {
    const linear = channels(colour).slice(0, 3).map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const opaque = (colour) => { const c = channels(colour); return c.length < 4 || c[3] > 0; };
  const behind = (element) => {
    while (element && !opaque(view.getComputedStyle(element).backgroundColor)) element = element.parentElement;
    return view.getComputedStyle(element || page.body).backgroundColor;
  };
  const contrast = (element, property, back) => {
    const light = [luminance(view.getComputedStyle(element)[property]), luminance(back || behind(element))].sort((a, b) => b - a);
    return (light[0] + 0.05) / (light[1] + 0.05);
  };
  const texts = all("h1, h2, li, p, th, td, span, b, figcaption").filter((element) => element.textContent.trim());
  const svgTexts = all("svg text");
  const onEachOther = (svg) => {
    const own = [...svg.querySelectorAll("text")], boxes = own.map((text) => text.getBoundingClientRect());
    const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
    return own.filter((_, i) => boxes.some((box, j) => j < i && meet(box, boxes[i]))).map((text) => text.textContent);
  };
  const pieces = all("figure:not(.wide) > svg > rect > title").map((title) => title.parentElement);
  const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1;
  const onPieces = svgTexts.filter((text) => text.style.fill.startsWith("rgb")).map((text) => [text.textContent, text.getBoundingClientRect()]);
  const found = {
    onEachOther: all("svg").flatMap(onEachOther),
    onBars: onPieces.filter(([_, box]) => !pieces.some((piece) => inside(box, piece.getBoundingClientRect()))).map(([text]) => text),
    stretches: boxes(".wide > svg > rect:has(title)").map((box) => [box.left, box.right]),
    tracks: boxes(".wide > svg > rect[fill-opacity]").filter((box) => box.height > 10).map((box) => [box.left, box.right]),
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    width: view.innerWidth,
    pageWidth: page.documentElement.scrollWidth,
    tables: boxes("table").map((box) => [box.width, box.height]),
    rows: all("tbody tr").length,
    boxesInside: boxes(".scroll, figure, .tiles div").every((box) => box.left >= 0 && box.right <= view.innerWidth),
    scrolling: all(".scroll").filter((box) => box.scrollWidth > box.clientWidth).length,
    figures: boxes("figure").map((box) => [box.width, box.height]),
    bars: pieces.map((piece) => piece.getBoundingClientRect()).map((box) => [box.width, box.height]),
    columns: boxes("svg rect, svg circle").map((box) => [box.width, box.height]),
    smallest: Math.min(...texts.map((element) => parseFloat(view.getComputedStyle(element).fontSize))),
    smallestInCharts: Math.min(...svgTexts.map((text) => parseFloat(view.getComputedStyle(text).fontSize))),
    overflowing: texts.filter((e) => !e.closest(".scroll") && e.scrollWidth > e.clientWidth + 1 && view.getComputedStyle(e).display !== "inline").map((e) => e.textContent),
    contrast: Math.min(...texts.map((element) => contrast(element, "color")), ...svgTexts.map((text) => contrast(text, "fill", view.getComputedStyle(text).stroke))),
  };
  document.getElementById("found").textContent = JSON.stringify(found);
};
