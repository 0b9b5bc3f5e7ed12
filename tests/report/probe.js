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
  const contrast = (element, property) => {
    const light = [luminance(view.getComputedStyle(element)[property]), luminance(behind(element))].sort((a, b) => b - a);
    return (light[0] + 0.05) / (light[1] + 0.05);
  };
  const texts = all("h1, h2, li, p, th, td, span, b, figcaption").filter((element) => element.textContent.trim());
  const svgTexts = all("svg text");
  const onEachOther = (svg) => {
    const own = [...svg.querySelectorAll("text")], boxes = own.map((text) => text.getBoundingClientRect());
    const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
    return own.filter((_, i) => boxes.some((box, j) => j < i && meet(box, boxes[i]))).map((text) => text.textContent);
  };
  const found = {
    onEachOther: all("svg").flatMap(onEachOther),
    onBars: all(".bar i").filter((piece) => piece.textContent && piece.scrollWidth > piece.clientWidth).map((piece) => piece.textContent),
    stretches: boxes(".track i").map((box) => [box.left, box.right]),
    tracks: boxes(".track").map((box) => [box.left, box.right]),
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    width: view.innerWidth,
    pageWidth: page.documentElement.scrollWidth,
    tables: boxes("table").map((box) => [box.width, box.height]),
    rows: all("tbody tr").length,
    boxesInside: boxes(".scroll, figure, .tiles div").every((box) => box.left >= 0 && box.right <= view.innerWidth),
    scrolling: all(".scroll").filter((box) => box.scrollWidth > box.clientWidth).length,
    figures: boxes("figure").map((box) => [box.width, box.height]),
    bars: boxes(".bar i").map((box) => [box.width, box.height]),
    columns: boxes("svg rect, svg circle").map((box) => [box.width, box.height]),
    smallest: Math.min(...texts.map((element) => parseFloat(view.getComputedStyle(element).fontSize))),
    smallestInCharts: Math.min(...svgTexts.map((text) => parseFloat(view.getComputedStyle(text).fontSize) * text.ownerSVGElement.getBoundingClientRect().width / 480)),
    overflowing: texts.filter((e) => !e.closest(".scroll") && e.scrollWidth > e.clientWidth + 1 && view.getComputedStyle(e).display !== "inline").map((e) => e.textContent),
    contrast: Math.min(...texts.map((element) => contrast(element, "color")), ...svgTexts.map((text) => contrast(text, "fill"))),
  };
  document.getElementById("found").textContent = JSON.stringify(found);
};
