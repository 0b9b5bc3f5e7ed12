/* What is wider than the page says that it scrolls; a page of messages finds the one that was read. */
"use strict";

function noteScrolling(box) {
  box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1);
}

/* The words of a text; a message stands for all its numbers. */
function wordsOf(text) {
  return new Set(text.toLowerCase().replace(/\d+/g, "0").match(/[\w./-]*\w/g) ?? []);
}

/* The lists' items and the tables' rows, with the words of their message and all their text. */
function messagesOf(page) {
  return Array.from(page.querySelectorAll("details.messages li, article table tbody tr"), (item) => ({
    item,
    words: wordsOf((item.querySelector("code, td") ?? item).textContent),
    text: item.textContent.toLowerCase().replace(/\d+/g, "0"),
  }));
}

/* Those with all words of what was typed; else, as a line that was pasted has names of its own, the most similar. */
function found(all, typed) {
  const having = all.filter(({ text }) => [...typed].every((word) => text.includes(word)));
  if (having.length) return having;
  const alike = all.map(({ words }) => [...words].reduce((sum, word) => sum + (typed.has(word) ? 3 : -1), 0));
  const most = Math.max(...alike);
  return most > 3 ? all.filter((_, at) => alike[at] === most) : [];
}

function findMessages(page) {
  const all = messagesOf(page), sections = page.querySelectorAll("section section");
  const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "A message, or words of it" });
  const count = document.createElement("output");
  input.setAttribute("aria-label", "Find a message on this page");
  const form = document.createElement("form");
  form.className = "find-message";
  form.append(input, count);
  form.addEventListener("submit", (event) => event.preventDefault());
  page.querySelector("h1").after(form);
  input.addEventListener("input", () => {
    const typed = wordsOf(input.value), matching = new Set(typed.size ? found(all, typed) : all);
    for (const each of all) each.item.hidden = !matching.has(each);
    const shown = new Set([...matching].map(({ item }) => item.closest("section")));
    for (const section of sections) section.hidden = typed.size > 0 && !shown.has(section);
    for (const list of page.querySelectorAll("details.messages")) list.open = typed.size > 0;
    count.value = typed.size ? `${matching.size} found` : "";
  });
}

addEventListener("DOMContentLoaded", () => {
  const observer = new ResizeObserver((entries) => entries.forEach(({ target }) => noteScrolling(target)));
  document.querySelectorAll(".table-wrapper, .drawing").forEach((box) => observer.observe(box));
  const page = document.querySelector("article:has(details.messages)");
  if (page) findMessages(page);
});
