// Fetches the page anew and shows its parts; the button stops and continues that.
const button = document.createElement("button"), state = document.createElement("p");
state.setAttribute("role", "status");
const looks = () => button.textContent === "Pause";
function show(text, running) {
  button.textContent = running ? "Pause" : "Go on";
  state.textContent = text;
}
function replaceMain(page) {
  const focused = document.activeElement.getAttribute("aria-label");
  document.title = page.title;
  document.querySelector("main").replaceWith(page.querySelector("main"));
  if (focused) [...document.querySelectorAll("main [aria-label]")].find((each) => each.ariaLabel === focused)?.focus();
}
async function look() {
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (looks()) replaceMain(page);
  } catch {
    show("The job, or the command that serves this page, has ended: these are its last figures.", false);
  }
}
button.addEventListener("click", () => {
  show(looks() ? "Paused." : "", !looks());
  if (looks()) look();
});
show("", true);
document.body.prepend(button, state);
setInterval(() => looks() && look(), 1000);
