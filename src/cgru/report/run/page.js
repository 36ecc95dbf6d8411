"use strict";
// Without this script every panel is seen and the pictures are cut in the middle.
document.documentElement.classList.add("js");

for (const tabs of document.querySelectorAll(".tabs")) {
  const buttons = [...tabs.querySelectorAll("[role=tab]")];
  const choose = (chosen) => {
    for (const button of buttons) {
      const isChosen = button === chosen;
      button.setAttribute("aria-selected", String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
      document.getElementById(button.getAttribute("aria-controls")).hidden = !isChosen;
    }
  };
  choose(buttons[0]);
  for (const button of buttons) {
    button.addEventListener("click", () => choose(button));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = buttons[(buttons.indexOf(button) + step + buttons.length) % buttons.length];
      choose(next);
      next.focus();
      event.preventDefault();
    });
  }
}

for (const compare of document.querySelectorAll(".compare")) {
  const slider = compare.querySelector(".slider");
  const cut = () => {
    compare.style.setProperty("--cut", `${slider.value}%`);
    slider.setAttribute("aria-valuetext", `${slider.value} % before, ${100 - slider.value} % after`);
  };
  slider.addEventListener("input", cut);
  cut();
  // A picture can be dragged, too: the line follows the pointer in all of them.
  for (const pair of compare.querySelectorAll(".pair")) {
    const follow = (event) => {
      if (event.type === "pointermove" && !event.buttons) return;
      const box = pair.getBoundingClientRect();
      const share = (100 * (event.clientX - box.left)) / box.width;
      slider.value = String(Math.min(100, Math.max(0, Math.round(share))));
      cut();
    };
    pair.addEventListener("pointerdown", follow);
    pair.addEventListener("pointermove", follow);
  }
}

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      // A page from disk may not be allowed to: the text is selected for the reader's own copying.
      getSelection().selectAllChildren(code);
    }
  });
}
