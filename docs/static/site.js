/* What is wider than the page says that it scrolls; a page of messages finds the one that was read. */
"use strict";

function noteScrolling(box) {
  box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1);
}

/* The lists' items and the tables' rows, each with what has to be in a line that was pasted, and the words to search. */
function* messages(page) {
  for (const item of page.querySelectorAll("details.messages li, article table tbody tr")) {
    const text = (item.querySelector("code, td") ?? item).textContent.trim();
    const fixed = text.split("…").map((part) => part.trim()).filter((part) => /\w\w/.test(part));
    yield { item, fixed: fixed.map((part) => part.toLowerCase()), text: item.textContent.toLowerCase() };
  }
}

/* Whether the fixed parts of a message stand in a line, in this order. */
function isOf(fixed, line) {
  let at = 0;
  return fixed.length > 0 && fixed.every((part) => {
    const found = line.indexOf(part, at);
    at = found + part.length;
    return found >= 0;
  });
}

function findMessages(page) {
  const all = [...messages(page)], folded = [...page.querySelectorAll("details.messages")];
  const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "A message, or words of it" });
  const count = document.createElement("output");
  input.setAttribute("aria-label", "Find a message on this page");
  const form = document.createElement("form");
  form.className = "find-message";
  form.append(input, count);
  form.addEventListener("submit", (event) => event.preventDefault());
  page.querySelector("h1").after(form);
  input.addEventListener("input", () => {
    const line = input.value.trim().toLowerCase(), words = line.split(/\s+/);
    const whole = all.filter(({ fixed }) => isOf(fixed, line));
    const longest = Math.max(...whole.map(({ fixed }) => fixed.join("").length));
    const found = new Set(whole.some(({ fixed }) => fixed.join("").length > 12)
      ? whole.filter(({ fixed }) => fixed.join("").length === longest)
      : all.filter(({ text }) => words.every((word) => text.includes(word))));
    for (const each of all) each.item.hidden = line !== "" && !found.has(each);
    for (const list of folded) {
      list.open = line !== "" && list.querySelector("li:not([hidden])") !== null;
      list.hidden = line !== "" && !list.open;
    }
    count.value = line === "" ? "" : `${found.size} found`;
  });
}

addEventListener("DOMContentLoaded", () => {
  const observer = new ResizeObserver((entries) => entries.forEach(({ target }) => noteScrolling(target)));
  document.querySelectorAll(".table-wrapper, .drawing").forEach((box) => observer.observe(box));
  const page = document.querySelector("article:has(details.messages)");
  if (page) findMessages(page);
});
