"use strict";
// Line and stacked charts in SVG. All text goes in by textContent.

const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else if (value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function shape(tag, attributes, parent) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else node.setAttribute(key, value);
  }
  parent.append(node);
  return node;
}

const color = (index) => `--color: var(--s${index % 6})`;

function format(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(3);
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const result = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) result.push(tick);
  return result;
}

// Mean over a window that is centred where it can be: about a twentieth of the run, at least 5 points.
function smoothed(points) {
  const half = Math.max(2, Math.round(points.length / 40));
  return points.map(([x], i) => {
    const part = points.slice(Math.max(0, i - half), i + half + 1);
    return [x, part.reduce((sum, point) => sum + point[1], 0) / part.length];
  });
}

// Areas on top of each other; a series without a number at a rollout counts as 0 there.
function stacked(series) {
  const steps = [...new Set(series.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
  const base = new Map(steps.map((step) => [step, 0]));
  return series.map((one) => {
    const values = new Map(one.points);
    return steps.map((step) => {
      const low = base.get(step);
      base.set(step, low + (values.get(step) ?? 0));
      return [step, base.get(step), low];
    });
  });
}

function chartRange(chart, layers) {
  if (chart.unit === "share") return [0, 1];
  const values = layers.flatMap((layer) => layer.map((point) => point[1]));
  let low = Math.min(...values), high = Math.max(...values);
  if (chart.kind === "stack") {
    // One stalled or compiling rollout would press all the others flat: what is far above most is cut off.
    const tops = layers[layers.length - 1].map((point) => point[1]).sort((a, b) => a - b);
    high = Math.min(high, 2 * tops[Math.floor(0.9 * (tops.length - 1))]);
  }
  if (chart.kind === "stack" || (low > 0 && low < 0.6 * high)) low = 0;
  if (low === 0 && high === 0) high = 1;
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  return [low, high + (high - low) * 0.05];
}

function drawChart(chart, steps, card, follow) {
  const svg = card.querySelector("svg");
  svg.replaceChildren();
  const width = svg.clientWidth || 360, height = 190, left = 46, right = 10, top = 8, bottom = 22;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const given = chart.kind === "stack" ? stacked(chart.series) : chart.series.map((one) => one.points);
  const [low, high] = chartRange(chart, given);
  const layers = given.map((points) => points.map(([step, ...values]) => [step, ...values.map((value) => Math.min(value, high))]));
  const x = (step) => left + ((step - steps[0]) / (steps[1] - steps[0])) * (width - left - right);
  const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  for (const tick of ticks(low, high, 5)) {
    shape("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }, svg);
    shape("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end", text: +tick.toPrecision(6) }, svg);
  }
  for (const tick of ticks(steps[0], steps[1], Math.max(2, width / 90))) {
    if (tick % 1 === 0) shape("text", { x: x(tick), y: height - 5, "text-anchor": "middle", text: tick }, svg);
  }
  shape("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }, svg);
  const path = (points, of = 1) => points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)},${y(p[of]).toFixed(1)}`).join("");
  layers.forEach((points, index) => {
    const style = color(index);
    if (chart.kind === "stack") {
      const back = path([...points].reverse(), 2).replace("M", "L");
      shape("path", { class: "area", style, d: `${path(points)}${back}Z` }, svg);
      return;
    }
    const calm = chart.smooth && points.length >= 12;
    if (calm) shape("path", { class: "raw", style, d: path(points) }, svg);
    shape("path", { class: "curve", style, d: path(calm ? smoothed(points) : points) }, svg);
    if (points.length < 12) points.forEach((p) => shape("circle", { class: "dot", style, r: 3, cx: x(p[0]), cy: y(p[1]) }, svg));
  });
  const cursor = shape("g", {}, svg);
  svg.onpointermove = (event) => {
    const inside = event.clientX - svg.getBoundingClientRect().left;
    follow(steps[0] + ((inside - left) / (width - left - right)) * (steps[1] - steps[0]), card);
  };
  svg.onpointerleave = () => follow(null, card);
  return { chart, card, cursor, x, y, layers, top, bottom: height - bottom, width };
}

function showCursor(drawn, step, withTooltip) {
  drawn.cursor.replaceChildren();
  drawn.card.querySelector(".tooltip")?.remove();
  if (step === null) return;
  const all = drawn.chart.series.flatMap((one) => one.points.map((point) => point[0]));
  const at = all.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), all[0]);
  shape("line", { class: "cursor", x1: drawn.x(at), x2: drawn.x(at), y1: drawn.top, y2: drawn.bottom }, drawn.cursor);
  const tooltip = element("div", { class: "tooltip" }, element("div", { text: `rollout ${at}` }));
  drawn.chart.series.forEach((one, index) => {
    const value = one.points.find((point) => point[0] === at)?.[1];
    if (value === undefined) return;
    const height = drawn.layers[index].find((point) => point[0] === at)[1];
    shape("circle", { class: "dot", style: color(index), r: 4, cx: drawn.x(at), cy: drawn.y(height) }, drawn.cursor);
    tooltip.append(element("div", { style: color(index) }, element("i"), one.label, element("b", { text: format(value) })));
  });
  if (!withTooltip) return;
  drawn.card.append(tooltip);
  const beside = drawn.x(at) + 26, room = drawn.card.clientWidth - tooltip.offsetWidth - 6;
  tooltip.style.left = `${beside < room ? beside : Math.max(4, drawn.x(at) - tooltip.offsetWidth + 2)}px`;
  tooltip.style.top = "64px";
}

function showCharts(charts, holder) {
  const ends = charts.flatMap((chart) => chart.series.flatMap((one) => one.points.map((point) => point[0])));
  const steps = [Math.min(...ends), Math.max(...ends)];
  if (steps[0] === steps[1]) steps[1] += 1;
  let drawn = [];
  const follow = (step, card) => drawn.forEach((one) => showCursor(one, step, one.card === card));
  const cards = charts.map((chart) => {
    const legend = element("div", { class: "legend" });
    chart.series.forEach((one, index) => {
      const last = one.points[one.points.length - 1][1];
      legend.append(element("span", { style: color(index) }, element("i"), one.label, element("b", { text: format(last) })));
    });
    const card = element("div", { class: "card chart" }, element("h3", { text: chart.title }),
      element("div", { class: "note", text: chart.note }), legend);
    shape("svg", { role: "img", "aria-label": `${chart.title} by rollout` }, card);
    holder.append(card);
    return card;
  });
  const draw = () => { drawn = charts.map((chart, index) => drawChart(chart, steps, cards[index], follow)); };
  draw();
  let width = holder.clientWidth;
  new ResizeObserver(() => { if (holder.clientWidth !== width) { width = holder.clientWidth; draw(); } }).observe(holder);
}
