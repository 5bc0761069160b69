// Small charts in SVG: lines over time, and bars. Text goes in as text, never as markup.
"use strict";

const Chart = (() => {
  const SPACE = { left: 46, right: 12, top: 10, bottom: 20 };

  const make = (parent, name, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };

  const number = (value) => {
    const size = Math.abs(value);
    if (size >= 100) return Math.round(value).toLocaleString("en-GB");
    return String(Number(value.toPrecision(3)));
  };

  // Round numbers from below the smallest value to above the largest.
  const ticks = (low, high) => {
    if (high <= low) high = low + (Math.abs(low) || 1);
    const rough = (high - low) / 3;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const found = [];
    for (let i = Math.floor(low / step + 1e-9); ; i++) {
      found.push(i * step);
      if (i * step >= high - step * 1e-9) return found;
    }
  };

  const frame = (svg, label) => {
    const width = svg.clientWidth || 320;
    const height = svg.clientHeight || 160;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", label);
    return { width, height };
  };

  const empty = (svg, label, words) => {
    const { width, height } = frame(svg, `${label}: ${words}`);
    make(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, words);
  };

  const levels = (svg, width, marks, y) => {
    for (const mark of marks) {
      make(svg, "line", {
        class: "grid", x1: SPACE.left, x2: width - SPACE.right, y1: y(mark), y2: y(mark),
      });
      const place = { x: SPACE.left - 6, y: y(mark) + 4, "text-anchor": "end" };
      make(svg, "text", place, number(mark));
    }
  };

  // `series` are lists of [time, value]; the second is drawn dashed.
  const lines = (svg, label, series, options) => {
    const all = series.flat();
    if (!all.length) return empty(svg, label, "nothing yet");
    const values = all.map((point) => point[1]);
    const marks = ticks(options.low ?? Math.min(...values), options.high ?? Math.max(...values));
    const end = Math.max(options.time, ...all.map((point) => point[0])) || 1;
    const { width, height } = frame(svg, described(label, series, options));
    const low = marks[0], high = marks[marks.length - 1];
    const x = (time) => SPACE.left + (time / end) * (width - SPACE.left - SPACE.right);
    const y = (value) =>
      height - SPACE.bottom - ((value - low) / (high - low)) * (height - SPACE.top - SPACE.bottom);
    levels(svg, width, marks, y);
    const foot = height - 4;
    make(svg, "text", { x: x(0), y: foot }, "0");
    make(svg, "text", { x: x(end), y: foot, "text-anchor": "end" }, `${number(end)} s`);
    series.forEach((points, index) => {
      const kind = index ? " two" : "";
      if (!points.length) return;
      const path = points.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
      make(svg, "polyline", { class: `line${kind}`, points: path.join(" ") });
      const [time, value] = points[points.length - 1];
      make(svg, "circle", { class: `dot${kind}`, cx: x(time), cy: y(value), r: 3.5 });
    });
  };

  const described = (label, series, options) => {
    const told = series.map((points, index) => {
      if (!points.length) return "";
      const [first, last] = [points[0], points[points.length - 1]];
      const name = options.names ? `${options.names[index]} ` : "";
      return `${name}from ${number(first[1])} at ${number(first[0])} s ` +
        `to ${number(last[1])} at ${number(last[0])} s`;
    });
    return `${label}: ${told.filter(Boolean).join("; ")}`;
  };

  // `found` are [from, to, count].
  const bars = (svg, label, found) => {
    if (!found.length) return empty(svg, label, "nothing yet");
    const name = ([from, to]) => (from === to ? `${from}` : `${from}–${to}`);
    const told = found.filter((bar) => bar[2]).map((bar) => `${name(bar)}: ${bar[2]}`);
    const { width, height } = frame(svg, `${label}: ${told.join(", ")}`);
    const marks = ticks(0, Math.max(...found.map((bar) => bar[2])));
    const high = marks[marks.length - 1];
    const y = (value) =>
      height - SPACE.bottom - (value / high) * (height - SPACE.top - SPACE.bottom);
    levels(svg, width, marks, y);
    // As wide as if there were some more, so that a lone bar does not fill the chart.
    const step = (width - SPACE.left - SPACE.right) / Math.max(found.length, 6);
    const every = Math.ceil(found.length / Math.max(1, Math.floor(width / 60)));
    found.forEach((bar, index) => {
      const left = SPACE.left + index * step;
      const top = y(bar[2]);
      make(svg, "rect", {
        class: "bar", x: left + step * 0.12, width: step * 0.76, y: top,
        height: Math.max(0, height - SPACE.bottom - top),
      });
      if (index % every) return;
      const place = { x: left + step / 2, y: height - 4, "text-anchor": "middle" };
      make(svg, "text", place, name(bar));
    });
  };

  return { lines, bars, number };
})();
