"use strict";
// The words of a stretch of the timeline, for a pointer and for arrow keys; without this script
// the table below the figure has the sums.
(() => {
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  const show = (mark) => {
    tip.textContent = mark.getAttribute("aria-label");
    tip.hidden = false;
    const at = mark.getBoundingClientRect();
    const middle = (Math.max(at.left, 0) + Math.min(at.right, innerWidth)) / 2;
    const left = Math.min(middle - tip.offsetWidth / 2, innerWidth - tip.offsetWidth - 4);
    const above = at.top - tip.offsetHeight - 8;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${above > 4 ? above : at.bottom + 8}px`;
  };
  for (const svg of document.querySelectorAll("svg[role=group]")) {
    const marks = [...svg.querySelectorAll(".mark")];
    if (!marks.length) continue;
    // Listeners for focus on the svg itself would make it one more stop for Tab.
    const box = svg.parentElement;
    const rows = new Map();
    const start = new Map();
    for (const mark of marks) {
      const row = Number(mark.dataset.row);
      if (!rows.has(row)) rows.set(row, []);
      rows.get(row).push(mark);
      start.set(mark, mark.getBBox().x);
    }
    for (const row of rows.values()) row.sort((a, b) => start.get(a) - start.get(b));
    const numbers = [...rows.keys()].sort((a, b) => a - b);
    let current = rows.get(numbers[0])[0];
    current.setAttribute("tabindex", "0"); // one stop for Tab; arrow keys go from there
    const go = (mark) => {
      if (!mark) return;
      current.setAttribute("tabindex", "-1");
      current = mark;
      current.setAttribute("tabindex", "0");
      current.focus();
    };
    const beside = (step) => {
      const row = rows.get(Number(current.dataset.row));
      return row[row.indexOf(current) + step];
    };
    const other = (step) => {
      const row = rows.get(numbers[numbers.indexOf(Number(current.dataset.row)) + step]);
      // The last that has begun when the current one begins.
      return row && (row.findLast((mark) => start.get(mark) <= start.get(current)) || row[0]);
    };
    const keys = {
      ArrowRight: () => beside(1), ArrowLeft: () => beside(-1),
      ArrowDown: () => other(1), ArrowUp: () => other(-1),
      Home: () => rows.get(Number(current.dataset.row))[0],
      End: () => rows.get(Number(current.dataset.row)).at(-1),
    };
    box.addEventListener("keydown", (event) => {
      if (event.key in keys && event.target.closest(".mark")) { event.preventDefault(); go(keys[event.key]()); }
    });
    box.addEventListener("focusin", (event) => { const m = event.target.closest(".mark"); if (m) show(m); });
    box.addEventListener("focusout", hide);
    box.addEventListener("pointerover", (event) => { const m = event.target.closest(".mark"); if (m) show(m); });
    box.addEventListener("pointerout", hide);
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", () => {
    const focused = document.activeElement.closest(".mark"); // focusing may itself have scrolled
    if (focused) show(focused); else hide();
  }, { capture: true, passive: true });
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
})();
