// The read-out of a chart: the points nearest to the pointer, or to the place the arrow keys moved to.
"use strict";
const readOut = (figure) => {
  const island = figure.querySelector("script.points");
  if (!island) return;
  const plot = figure.querySelector(".plot");
  const cursor = plot.querySelector(".cursor");
  const output = figure.querySelector("output");
  let text, data, low, high, main, at;
  // A live page replaces the text of the island: it is parsed again where it is another one.
  const load = () => {
    if (island.textContent === text) return;
    text = island.textContent;
    data = JSON.parse(text);
    [low, high] = data.x;
    main = data.series[0][2];
    at = Math.min(at ?? Infinity, main.length - 1);
  };

  const nearest = (xs, x) => {
    let begin = 0, end = xs.length - 1;
    while (begin < end) {
      const middle = (begin + end) >> 1;
      if (xs[middle] < x) begin = middle + 1; else end = middle;
    }
    return begin > 0 && x - xs[begin - 1] <= xs[begin] - x ? begin - 1 : begin;
  };
  const height = (y) => {
    const [bottom, top] = data.y;
    return data.log ? Math.log(y / bottom) / Math.log(top / bottom) : (y - bottom) / (top - bottom);
  };
  const number = (y) => (y === null ? "not a number" : String(Number(y.toPrecision(4))));

  const show = (x) => {
    const parts = [];
    cursor.replaceChildren();
    for (const [name, style, xs, ys] of data.series) {
      const row = nearest(xs, x);
      // Sparse points (evaluations) are read only where they are.
      if (row < 0 || Math.abs(xs[row] - x) > (high - low) * 0.02 + 1) continue;
      const y = ys[row];
      parts.push(name + " " + number(y));
      if (y === null || style.startsWith("g") || style === "sum") continue;
      const dot = document.createElement("i");
      dot.style.bottom = 100 * Math.min(Math.max(height(y), 0), 1) + "%";
      cursor.append(dot);
    }
    cursor.style.left = (100 * (x - low)) / (high - low || 1) + "%";
    cursor.hidden = false;
    output.textContent = "step " + Math.round(x) + ": " + parts.join(", ") + " " + data.unit;
  };
  const showRow = (row) => {
    at = Math.min(Math.max(row, 0), main.length - 1);
    if (main.length) show(main[at]);
  };
  const hide = () => { cursor.hidden = true; output.textContent = ""; };

  plot.addEventListener("pointermove", (event) => {
    load();
    const box = plot.getBoundingClientRect();
    const x = low + ((event.clientX - box.left) / box.width) * (high - low);
    if (main.length) showRow(nearest(main, x));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    load();
    const big = Math.max(1, Math.round(main.length / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -big, PageDown: big, Home: -main.length, End: main.length };
    if (event.key === "Escape") return hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    showRow(cursor.hidden ? at : at + moves[event.key]);
  });
};
for (const figure of document.querySelectorAll("figure.chart")) readOut(figure);
