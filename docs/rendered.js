/* Loads each page of the site into the frame and measures what is drawn; docs/rendered.py serves this and gets the result. */
"use strict";
const WIDTHS = [390, 1280], SCHEMES = ["light", "dark"], LEAST_CONTRAST = 4.5, MESSAGES = "troubleshooting.html";
const frame = document.querySelector("iframe");

function load(address, width) {
  frame.style.width = `${width}px`;
  return new Promise((done) => {
    frame.onload = done;
    frame.src = address;
  });
}

function frames(count) {
  return new Promise((done) => {
    const next = () => (count-- > 0 ? requestAnimationFrame(next) : done());
    next();
  });
}

async function wait(condition) {
  for (let tries = 0; tries < 400 && !condition(); tries++) await new Promise((done) => setTimeout(done, 25));
  return condition();
}

/* Tables whose last column is cut, and pages that are wider than the window. */
function* cut(page, width) {
  const view = page.defaultView;
  const content = page.querySelector("article") ?? page.body;
  if (page.documentElement.scrollWidth > width) yield `is ${page.documentElement.scrollWidth} pixels wide`;
  for (const table of content.querySelectorAll("table")) {
    const box = table.getBoundingClientRect();
    if (!box.width) continue;
    let around = table.parentElement, right = box.right;
    for (; around !== page.body; around = around.parentElement) {
      const overflow = view.getComputedStyle(around).overflowX, edge = around.getBoundingClientRect().right;
      if (right <= edge + 1 || overflow === "visible") continue;
      const note = view.getComputedStyle(around, "::before").content;
      const scrolls = ["auto", "scroll"].includes(overflow);
      if (!scrolls || note === "none" || note === "normal") {
        const head = table.textContent.trim().replace(/\s+/g, " ").slice(0, 60);
        yield `a table's last column is cut${scrolls ? " and nothing says that it scrolls" : ""}: ${head}`;
      }
      right = edge;
    }
    if (right > width + 1) yield `a table leaves the window: ${table.textContent.trim().slice(0, 60)}`;
  }
}

/* A colour as [red, green, blue, alpha], 0 to 255 and 0 to 1. */
function parsed(colour) {
  const [red = 0, green = 0, blue = 0, alpha = 1] = (colour.match(/[\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  return [red, green, blue, alpha];
}

function over([red, green, blue, alpha], [r, g, b]) {
  return [red * alpha + r * (1 - alpha), green * alpha + g * (1 - alpha), blue * alpha + b * (1 - alpha), 1];
}

function luminance(colour) {
  const [red, green, blue] = colour.slice(0, 3).map((each) => each / 255)
    .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

/* What is behind an element: the backgrounds of all elements around it, the outermost first. */
function behind(element, known) {
  if (!element) return [255, 255, 255, 1];
  if (!known.has(element)) {
    const view = element.ownerDocument.defaultView;
    known.set(element, over(parsed(view.getComputedStyle(element).backgroundColor), behind(element.parentElement, known)));
  }
  return known.get(element);
}

/* What is behind a drawing's text: its halo, or the rectangles before it that lie there. */
function behindInDrawing(text, style, known) {
  if (style.stroke !== "none" && parseFloat(style.strokeWidth) > 0) return parsed(style.stroke);
  const drawing = text.closest("figure svg, body svg"), at = text.getBoundingClientRect();
  const x = at.left + at.width / 2, y = at.top + at.height / 2;
  let colour = behind(drawing.parentElement, known);
  for (const part of drawing.querySelectorAll("rect, text")) {
    if (part === text) break;
    const box = part.getBoundingClientRect();
    if (part.tagName === "text" || x < box.left || x > box.right || y < box.top || y > box.bottom) continue;
    const { fill, fillOpacity } = text.ownerDocument.defaultView.getComputedStyle(part);
    if (fill.startsWith("rgb")) colour = over([...parsed(fill).slice(0, 3), parseFloat(fillOpacity)], colour);
  }
  return colour;
}

/* Texts with too little contrast, each kind once. */
function* faint(page) {
  const view = page.defaultView, known = new Map(), told = new Set();
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || seen.has(element) || element.closest("script, style, title")) continue;
    seen.add(element);
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const style = view.getComputedStyle(element), drawn = element.namespaceURI.endsWith("svg");
    const back = drawn ? behindInDrawing(element, style, known) : behind(element, known);
    const front = over(parsed(drawn ? style.fill : style.color), back), ratio = contrast(front, back);
    const kind = `${element.tagName} ${element.className.baseVal ?? element.className} ${front} ${back}`;
    if (ratio >= LEAST_CONTRAST || told.has(kind)) continue;
    told.add(kind);
    yield `a contrast of ${ratio.toFixed(2)} to 1 (${front.map(Math.round).slice(0, 3)} on ${back.map(Math.round)
      .slice(0, 3)}): ${walker.currentNode.data.trim().slice(0, 40)}`;
  }
}

function* pictures(page) {
  for (const picture of page.images) {
    if (!picture.alt.trim()) yield `a picture without a description: ${picture.src}`;
    if (picture.complete && !picture.naturalWidth) yield `a picture that is not there: ${picture.src}`;
  }
  for (const drawing of page.querySelectorAll("figure > svg:not([aria-label])")) yield "a drawing without a description";
}

async function measured(name) {
  const found = [];
  await load(name, WIDTHS[0]);
  const page = frame.contentDocument;
  page.head.insertAdjacentHTML("beforeend", "<style>* { transition: none !important; }</style>");
  for (const folded of page.querySelectorAll("details")) folded.open = true;
  for (const width of WIDTHS) {
    frame.style.width = `${width}px`;
    await frames(3);
    found.push(...Array.from(cut(page, width), (each) => `at ${width} pixels: ${each}`));
  }
  for (const scheme of SCHEMES) {
    page.body.dataset.theme = scheme;
    await frames(1);
    found.push(...Array.from(faint(page), (each) => `${scheme}: ${each}`));
  }
  return [...found, ...pictures(page)].map((each) => `${name}: ${each}`);
}

/* Whether a search has results, with an excerpt below each page, and pages before attributes. */
async function searched(words) {
  await load(`search.html?q=${words}`, WIDTHS[1]);
  const page = frame.contentDocument;
  const results = () => [...page.querySelectorAll("ul.search > li")];
  const isPage = (each) => !/kind-(object|index)/.test(each.className);
  const finished = () => page.querySelector("#search-results h2")?.textContent === "Search Results";
  const found = [];
  if (!(await wait(finished)) || results().length < 2) return [`search for ${words}: no results`];
  await wait(() => results().every((each) => each.querySelector("p.context")));
  const kinds = results().map(isPage), first = kinds.indexOf(false);
  if (!kinds[0] || (first >= 0 && kinds.indexOf(true, first) >= 0)) found.push("attributes stand before guides");
  const bare = results().filter((each) => isPage(each) && !each.querySelector("p.context"));
  found.push(...bare.map((each) => `${each.textContent} has no excerpt`));
  return found.map((each) => `search for ${words}: ${each}`);
}

/* Whether the page of messages shows the one that a pasted line is of. */
async function pasted(name, line) {
  await load(name, WIDTHS[1]);
  const input = frame.contentDocument.querySelector(".find-message input");
  if (!input) return [];
  input.value = line;
  input.dispatchEvent(new Event("input"));
  const said = frame.contentDocument.querySelector(".find-message output").value;
  return said === "1 found" ? [] : [`${name}: ${said} for ${line}`];
}

async function all({ pages, searches }) {
  const found = [];
  for (const page of pages) found.push(...(await measured(page)));
  if (pages.includes(MESSAGES)) found.push(...(await pasted(MESSAGES, "clcomm: rank 1 died at step 12 of SIGKILL")));
  for (const words of searches) found.push(...(await searched(words)));
  return found;
}

fetch("plan.json").then((answer) => answer.json()).then(all).catch((error) => [`${error.stack}`])
  .then((found) => fetch("found", { method: "POST", body: JSON.stringify(found) }));
