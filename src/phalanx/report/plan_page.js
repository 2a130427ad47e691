// The sliders: values between the points of a grid that the planner computed. No formula of a model is here.
"use strict";
const island = document.querySelector("script.grid");
if (island) {
  const grid = JSON.parse(island.textContent);
  const controls = [...document.querySelectorAll("[data-axis]")];
  // Memory decides what may be filled, and nothing else: it comes after the axes of the columns.
  const memory = grid.axes.length;
  // How far apart neighbours of each axis lie in the flat lists: the last axis varies fastest.
  const strides = grid.axes.map((_, axis) =>
    grid.axes.slice(axis + 1).reduce((product, other) => product * other.values.length, 1));
  const canMove = (axis) => axis.kind !== "choice" && axis.values.length > 1;
  let moved = Math.max(0, grid.axes.findIndex(canMove));

  const readPlace = (axis) => {
    const control = controls[axis];
    return Number(control.value) / Number(control.dataset.between || 1);
  };
  const readPlaces = () => grid.axes.map((_, axis) => readPlace(axis));

  // Multilinear between the corners of the cell; null where a corner that counts is missing.
  const interpolate = (values, places) => {
    let corners = [[0, 1]];
    places.forEach((place, axis) => {
      const low = Math.floor(place), part = place - low;
      const next = [];
      for (const [offset, weight] of corners) {
        if (part < 1) next.push([offset + low * strides[axis], weight * (1 - part)]);
        if (part > 0) next.push([offset + (low + 1) * strides[axis], weight * part]);
      }
      corners = next;
    });
    let sum = 0;
    for (const [offset, weight] of corners) {
      const value = values[offset];
      if (value === null || value === undefined) return null;
      sum += weight * value;
    }
    return sum;
  };

  // Between two points an axis with a logarithmic scale is read geometrically, as its dots are spaced.
  const axisValue = ({ values, log }, place) => {
    const low = Math.floor(place), part = place - low;
    if (!part) return values[low];
    return log ? values[low] * (values[low + 1] / values[low]) ** part : values[low] + part * (values[low + 1] - values[low]);
  };
  const short = (value) => {
    const digits = Math.abs(value) < 10 ? 3 : Math.abs(value) < 100 ? 3 : Math.abs(value) < 1000 ? 3 : 0;
    return digits ? String(Number(value.toPrecision(digits))) : Math.round(value).toLocaleString("en");
  };
  const seconds = (value) => (value < 1 ? short(1000 * value) + " ms" : value < 120 ? short(value) + " s" : short(value / 60) + " min");
  const gib = (value) => short(value) + " GiB";

  const write = (key, text, style) => {
    const element = document.querySelector(`[data-output="${key}"]`);
    element.textContent = text;
    element.className = style || "";
  };

  const readCapacity = () => {
    const place = readPlace(memory), low = Math.floor(place), part = place - low, all = grid.capacity_gib;
    return part ? all[low] + part * (all[low + 1] - all[low]) : all[low];
  };
  const isPoint = (places) => places.every((place) => Number.isInteger(place));
  const showAnswer = (places) => {
    const step = interpolate(grid.step_s, places);
    const peak = interpolate(grid.peak_gib, places);
    const speed = interpolate(grid.tokens_per_s, places);
    const capacity = readCapacity();
    const nothing = "not computed here";
    const about = isPoint(places) ? "" : "≈ ";
    write("step_s", step === null ? nothing : about + seconds(step));
    write("tokens_per_s", speed === null ? nothing : about + short(speed));
    write("peak", peak === null ? nothing : about + gib(peak));
    if (peak === null) write("fits", nothing);
    else if (peak <= capacity) write("fits", "fits in " + gib(capacity), "yes");
    else write("fits", "needs more than " + gib(capacity), "no");
  };

  const showAxes = (places) => {
    [...grid.axes, grid.memory_axis].forEach((axis, number) => {
      const output = controls[number].closest(".control").querySelector("output");
      if (!output) return;
      const value = axisValue(axis, number === memory ? readPlace(memory) : places[number]);
      output.textContent = (axis.kind === "range" ? short(value) : value.toLocaleString("en")) + (axis.unit ? " " + axis.unit : "");
    });
  };

  const space = "http://www.w3.org/2000/svg";
  const draw = (parent, name, attributes, text) => {
    const element = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
  };

  const width = 420, height = 170, left = 58, right = 12, top = 12, bottom = 30;
  const showCurve = (key, values, limit, places, format) => {
    const parent = document.querySelector(`[data-curve="${key}"]`);
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const axis = grid.axes[moved], last = axis.values.length - 1;
    const at = (place) => places.map((own, number) => (number === moved ? place : own));
    const points = axis.values.map((_, place) => interpolate(values, at(place)));
    const computed = points.filter((value) => value !== null);
    const present = limit === null ? computed : [...computed, limit];
    if (!computed.length) { parent.replaceChildren("Nothing was computed here."); return; }
    const high = 1.08 * Math.max(...present);
    const x = (place) => left + ((width - left - right) * place) / Math.max(last, 1);
    const y = (value) => height - bottom - ((height - bottom - top) * value) / high;
    for (const part of [0, 0.5, 1]) {
      draw(svg, "line", { x1: left, x2: width - right, y1: y(part * high), y2: y(part * high), class: part ? "gridline" : "base" });
      draw(svg, "text", { x: left - 6, y: y(part * high) + 4, "text-anchor": "end" }, part ? format(part * high) : "0");
    }
    const path = (line) => line.map((value, place) => (value === null ? "" : (place && line[place - 1] !== null ? "L" : "M") + x(place) + " " + y(value))).join("");
    draw(svg, "path", { d: path(points), class: "line" });
    if (limit !== null) {
      draw(svg, "path", { d: `M${left} ${y(limit)}H${width - right}`, class: "limit" });
      draw(svg, "text", { x: left + 6, y: y(limit) - 5, class: "limittext" }, "may be filled");
    }
    points.forEach((value, place) => {
      draw(svg, "text", { x: x(place), y: height - 12, "text-anchor": place === last && last ? "end" : place ? "middle" : "start" }, short(axis.values[place]));
      if (value !== null) draw(svg, "circle", { cx: x(place), cy: y(value), r: 3.5, class: "point" });
    });
    draw(svg, "text", { x: (left + width - right) / 2, y: height - 0.5, "text-anchor": "middle" }, axis.label + (axis.unit ? ", " + axis.unit : ""));
    const now = interpolate(values, places);
    if (now !== null) draw(svg, "circle", { cx: x(places[moved]), cy: y(now), r: 5, class: "now" });
    parent.replaceChildren(svg);
  };

  const show = () => {
    const places = readPlaces();
    showAxes(places);
    showAnswer(places);
    showCurve("step", grid.step_s, null, places, seconds);
    showCurve("memory", grid.peak_gib, readCapacity(), places, gib);
  };
  controls.forEach((control, axis) => control.addEventListener("input", () => {
    if (axis < memory && canMove(grid.axes[axis])) moved = axis;
    show();
  }));
  show();
}
