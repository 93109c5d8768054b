"use strict";
// Without this script all is there, too; with it, a strip's tokens are walked with the arrow keys and read out below it.
const strips = [...document.querySelectorAll(".tokens")];
const tokenOf = (target) => target instanceof Element ? target.closest(".tokens > b") : null;

for (const strip of strips) {
  strip.setAttribute("role", "listbox");
  const first = strip.querySelector(".t") || strip.firstElementChild;
  if (first) { first.tabIndex = 0; first.setAttribute("role", "option"); }
}

function say(token) {
  const output = token.parentElement.nextElementSibling;
  output.textContent = `${token.textContent} — ${token.title}`;
}

function walk(token, event) {
  const all = token.parentElement.children;
  const to = {
    ArrowRight: token.nextElementSibling, ArrowLeft: token.previousElementSibling, Home: all[0], End: all[all.length - 1],
  }[event.key];
  if (!to) return;
  event.preventDefault();
  token.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

document.addEventListener("pointerover", (event) => { const token = tokenOf(event.target); if (token) say(token); });
document.addEventListener("focusin", (event) => {
  const token = tokenOf(event.target);
  if (!token) return;
  for (const each of token.parentElement.children) each.setAttribute("role", "option");
  token.setAttribute("aria-label", `${token.textContent}, ${token.title}`);
  say(token);
});
document.addEventListener("keydown", (event) => { const token = tokenOf(event.target); if (token) walk(token, event); });

const cases = [...document.querySelectorAll("details.case")];
for (const button of document.querySelectorAll("button[data-open]")) {
  button.hidden = false;
  button.addEventListener("click", () => { for (const each of cases) each.open = button.dataset.open === "true"; });
}

function follow() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const around = target && target.closest("details.case");
  if (around) { around.open = true; target.scrollIntoView(); }
}
addEventListener("hashchange", follow);
follow();
