"use strict";
// Charts of the report and of the server's page, in SVG and on canvas: lines with bands, areas on top of each other,
// bars, and a map of problems. Each has a table of its numbers and is read by pointer or by arrow keys. All text goes in
// by textContent.

const SVG = "http://www.w3.org/2000/svg";
const SERIES = 6;  // colours; neighbours also differ by their dashes
const DASHES = [["", "solid"], ["7 3", "dashed"], ["2 3", "dotted"]];
const RIGHT = 12, TOP = 8, BOTTOM = 34;
const WIDEST = 72;  // of a bar, so that equal values are no solid block

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
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

const color = (one, index) => `--color: var(--${one.color ?? `s${index % SERIES}`})`;

const dash = (index) => DASHES[index % DASHES.length];

function format(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return size >= 100 ? String(+value.toFixed(0)) : size >= 10 ? value.toFixed(1) : value.toFixed(3);
}

function ticks(low, high, count, whole = false) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9));
  if (whole) step = Math.max(1, step);
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) result.push(i * step);
  return result;
}

// As many digits as tell neighbours apart; very large and very small numbers with a power of ten.
function tickLabels(values) {
  const size = Math.max(...values.map(Math.abs));
  const step = values.length > 1 ? values[1] - values[0] : size || 1;
  const exponent = (number) => Math.floor(Math.log10(number) + 1e-9);
  if (size >= 1e5 || (size > 0 && size < 1e-2)) {
    const power = exponent(size), digits = Math.max(0, power - exponent(step));
    return values.map((value) => (Math.abs(value) < step / 2 ? "0" : `${(value / 10 ** power).toFixed(digits)}e${power}`));
  }
  return values.map((value) => value.toFixed(Math.max(0, -exponent(step))));
}

// Mean over a window that is centred where it can be: about a twentieth of the run, at least 5 points.
function smoothed(points) {
  const half = Math.max(2, Math.round(points.length / 40));
  return points.map(([x], i) => {
    const part = points.slice(Math.max(0, i - half), i + half + 1);
    return [x, part.reduce((sum, point) => sum + point[1], 0) / part.length];
  });
}

const stopsOf = (chart) => [...new Set(chart.series.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);

// Areas on top of each other; a series without a number at a rollout counts as 0 there.
function stacked(series, steps) {
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
  const bands = chart.series.flatMap((one) => (one.band ?? []).flatMap((point) => point.slice(1)));
  let low = Infinity, high = -Infinity;
  for (const value of [...values, ...bands]) { low = Math.min(low, value); high = Math.max(high, value); }
  if (chart.kind === "stack") {
    // One stalled or compiling rollout would press all the others flat: what is far above most is cut off.
    const tops = layers[layers.length - 1].map((point) => point[1]).sort((a, b) => a - b);
    high = Math.min(high, 2 * tops[Math.floor(0.9 * (tops.length - 1))]);
  }
  if (chart.kind === "stack" || (low > 0 && (low < 0.6 * high || low === high))) low = 0;
  if (low === 0 && high === 0) high = 1;
  if (low === high) { low *= 1.2; high = 0; }
  return [low, high + (high - low) * 0.05];
}

// The frame of a plot with numbers on the left; returns where things go.
function frame(chart, svg, [low, high], places) {
  svg.replaceChildren();
  const width = svg.clientWidth || 360, height = svg.clientHeight || 210;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const marks = ticks(low, high, 5, chart.kind === "bars"), names = tickLabels(marks);
  const left = 14 + 6.6 * Math.max(...names.map((name) => name.length));
  const y = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - TOP - BOTTOM);
  marks.forEach((tick, i) => {
    shape("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(tick), y2: y(tick) }, svg);
    shape("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end", text: names[i] }, svg);
  });
  const x = places(left, width - RIGHT);
  shape("line", { class: "axis", x1: left, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }, svg);
  shape("text", { class: "axis-name", x: width - RIGHT, y: height - 3, "text-anchor": "end", text: chart.x }, svg);
  return { x, y, left, width, height };
}

function lineChart(chart, svg, ends) {
  const stops = stopsOf(chart);
  const given = chart.kind === "stack" ? stacked(chart.series, stops) : chart.series.map((one) => one.points);
  const range = chartRange(chart, given);
  const scale = chart.log ? Math.log2 : (value) => value;
  const [first, last] = (chart.log ? [stops[0], stops[stops.length - 1]] : ends).map(scale);
  const { x, y, left, width, height } = frame(chart, svg, range, (from, to) => (value) =>
    from + (last === first ? 0.5 : (scale(value) - first) / (last - first)) * (to - from));
  const bottom = height - BOTTOM;
  const named = chart.log ? stops : ticks(first, last === first ? first + 1 : last, Math.max(2, (width - left) / 70), true);
  for (const tick of named.filter((one) => chart.log || one <= last)) {
    shape("text", { x: x(tick), y: bottom + 14, "text-anchor": "middle", text: tick }, svg);
  }
  const most = range[1];
  const path = (points, of = 1) =>
    points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)},${y(Math.min(p[of], most)).toFixed(1)}`).join("");
  const area = (points, top, low) => `${path(points, top)}${path([...points].reverse(), low).replace("M", "L")}Z`;
  chart.series.forEach((one, index) => {
    const points = given[index], style = color(one, index);
    if (chart.kind === "stack") return void shape("path", { class: "area", style, d: area(points, 1, 2) }, svg);
    const band = one.band ?? [];
    if (band.length > 1) shape("path", { class: "band", style, d: area(band, 2, 1) }, svg);
    for (const [at, low, high] of band.length <= 40 ? band : []) {
      shape("line", { class: "whisker", style, x1: x(at), x2: x(at), y1: y(low), y2: y(high) }, svg);
    }
    const calm = chart.smooth && points.length >= 12;
    if (calm) shape("path", { class: "raw", style, d: path(points) }, svg);
    shape("path", { class: "curve", style, "stroke-dasharray": dash(index)[0], d: path(calm ? smoothed(points) : points) }, svg);
    if (points.length < 12) points.forEach((p) => shape("circle", { class: "dot", style, r: 3, cx: x(p[0]), cy: y(p[1]) }, svg));
  });
  const values = chart.series.map((one) => new Map(one.points));
  const bands = chart.series.map((one) => new Map((one.band ?? []).map((point) => [point[0], point])));
  const tops = given.map((points) => new Map(points.map((point) => [point[0], Math.min(point[1], most)])));
  return {
    stops,
    at: (inside) => nearest(stops, (stop) => Math.abs(x(stop) - inside)),
    place: (index) => x(stops[index]),
    heading: (index) => `${chart.x} ${stops[index]}`,
    lines: (index) => chart.series.flatMap((one, i) => {
      const value = values[i].get(stops[index]), band = bands[i].get(stops[index]);
      if (value === undefined) return [];
      return [[one.label, format(value) + (band ? ` (${format(band[1])}–${format(band[2])})` : ""), color(one, i)]];
    }),
    mark: (index, layer) => {
      const at = stops[index];
      shape("line", { class: "cursor", x1: x(at), x2: x(at), y1: TOP, y2: bottom }, layer);
      chart.series.forEach((one, i) => {
        if (!values[i].has(at)) return;
        shape("circle", { class: "dot", style: color(one, i), r: 4, cx: x(at), cy: y(tops[i].get(at)) }, layer);
      });
    },
  };
}

function nearest(stops, distance) {
  let best = 0;
  stops.forEach((stop, index) => { if (distance(stop) < distance(stops[best])) best = index; });
  return best;
}

// chart.labels name the bars; the values of the series stand on top of each other, or side by side.
function barChart(chart, svg) {
  const join = chart.side ? (sum, value) => Math.max(sum, value) : (sum, value) => sum + value;
  const totals = chart.labels.map((_, i) => chart.series.map((one) => one.values[i]).reduce(join, 0));
  const most = Math.max(1, ...totals), count = chart.labels.length;
  const { x, y, left, width, height } = frame(chart, svg, [0, most * 1.05], (from, to) => (i) => from + ((to - from) * i) / count);
  const room = x(1) - x(0), wide = Math.min(room - Math.min(3, room * 0.15), WIDEST), bottom = height - BOTTOM;
  const every = Math.ceil((Math.max(...chart.labels.map((label) => label.length)) * 6.6 + 8) / room);
  chart.labels.forEach((label, i) => {
    if (i % every === 0) shape("text", { x: x(i) + room / 2, y: bottom + 14, "text-anchor": "middle", text: label }, svg);
    let base = 0;
    const bar = chart.side ? wide / chart.series.length : wide;
    chart.series.forEach((one, index) => {
      const value = one.values[i];
      if (!value) return;
      const top = y(base + value), at = x(i) + (room - wide) / 2 + (chart.side ? index * bar : 0);
      shape("rect", { class: "fill", style: color(one, index), x: at, width: bar, y: top, height: y(base) - top }, svg);
      if (!chart.side) base += value;
    });
  });
  return {
    stops: chart.labels,
    at: (inside) => Math.max(0, Math.min(count - 1, Math.floor((inside - left) / room))),
    place: (index) => x(index) + room / 2,
    heading: (index) => `${chart.x} ${chart.labels[index]}`,
    lines: (index) => chart.series.map((one, i) => [one.label, String(one.values[index]), color(one, i)]),
    mark: (index, layer) => shape("rect", { class: "outline", x: x(index), width: room, y: TOP, height: bottom - TOP }, layer),
    width,
  };
}

// chart.rows are problems, with a share or null for each of chart.columns; shares from 0 (dark) to 1 (light) in one colour.
function mapChart(chart, svg) {
  svg.replaceChildren();
  const width = svg.clientWidth || 360, height = svg.clientHeight || 210, left = 14, bottom = height - BOTTOM;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const columns = chart.columns.length, rows = chart.rows.length;
  const across = (width - left - RIGHT) / columns, down = (bottom - TOP) / rows;
  const canvas = element("canvas", { width: columns, height: rows }), brush = canvas.getContext("2d");
  const style = getComputedStyle(svg), [low, high, none] = ["--map-low", "--map-high", "--none"].map((name) => rgb(style.getPropertyValue(name)));
  const image = brush.createImageData(columns, rows);
  chart.rows.forEach((row, r) => row.values.forEach((value, c) => {
    const shade = value === null ? none : low.map((from, i) => from + (high[i] - from) * value);
    image.data.set([...shade, 255], 4 * (r * columns + c));
  }));
  brush.putImageData(image, 0, 0);
  shape("image", { class: "map", href: canvas.toDataURL(), x: left, y: TOP, width: width - left - RIGHT, height: bottom - TOP, preserveAspectRatio: "none" }, svg);
  const every = Math.ceil((String(chart.columns[columns - 1]).length * 6.6 + 12) / across);
  chart.columns.forEach((column, i) => {
    if (i % every === 0) shape("text", { x: left + (i + 0.5) * across, y: bottom + 14, "text-anchor": "middle", text: column }, svg);
  });
  shape("text", { class: "axis-name", x: width - RIGHT, y: height - 3, "text-anchor": "end", text: chart.x }, svg);
  shape("text", { transform: `translate(10 ${TOP}) rotate(-90)`, "text-anchor": "end", text: "problems, hardest first" }, svg);
  return {
    stops: chart.rows,
    vertical: true,
    at: (inside, beneath) => Math.max(0, Math.min(rows - 1, Math.floor((beneath - TOP) / down))),
    place: () => width / 2,
    heading: (index) => chart.rows[index].label,
    lines: (index) => [0, columns - 1].filter((c, i, all) => all.indexOf(c) === i).map((c) => {
      const value = chart.rows[index].values[c];
      return [`${chart.x} ${chart.columns[c]}`, value === null ? "not judged" : format(value), ""];
    }),
    mark: (index, layer) => shape("rect", { class: "outline", x: left, width: width - left - RIGHT, y: TOP + index * down, height: Math.max(2, down) }, layer),
  };
}

function rgb(text) {
  const digits = text.trim().slice(1);
  return [0, 2, 4].map((i) => parseInt(digits.slice(i, i + 2), 16));
}

const DRAW = { line: lineChart, stack: lineChart, bars: barChart, map: mapChart };

// The numbers of a chart as rows of a table; the first row names the columns.
function tableRows(chart) {
  if (chart.kind === "bars") {
    return [[chart.x, ...chart.series.map((one) => one.label)],
      ...chart.labels.map((label, i) => [label, ...chart.series.map((one) => one.values[i])])];
  }
  if (chart.kind === "map") {
    return [["problem", ...chart.columns.map((column) => `${chart.x} ${column}`)],
      ...chart.rows.map((row) => [row.label, ...row.values.map((value) => (value === null ? "not judged" : format(value)))])];
  }
  const names = chart.series.flatMap((one) => [one.label, ...(one.band?.length ? [`${one.label}, low`, `${one.label}, high`] : [])]);
  const columns = chart.series.flatMap((one) => {
    const band = one.band ?? [];
    return [one.points, ...(band.length ? [band.map(([x, low]) => [x, low]), band.map(([x, , high]) => [x, high])] : [])];
  }).map((points) => new Map(points));
  return [[chart.x, ...names], ...stopsOf(chart).map((stop) =>
    [stop, ...columns.map((column) => (column.has(stop) ? format(column.get(stop)) : "–"))])];
}

function numberTable(caption, rows) {
  const [head, ...body] = rows;
  const cells = (row, tag) => row.map((cell, i) => element(i ? tag : "th", { scope: tag === "th" ? "col" : i ? null : "row", text: cell }));
  return element("table", {}, element("caption", { text: caption }),
    element("thead", {}, element("tr", {}, ...cells(head, "th"))),
    element("tbody", {}, ...body.map((row) => element("tr", {}, ...cells(row, "td")))));
}

// A closed table under a chart, made when it is opened: a page with all of them would open slowly.
function tableBelow(chart) {
  const details = element("details", { class: "numbers" }, element("summary", { text: "Table" }));
  details.querySelector("summary").setAttribute("aria-label", `Table: ${chart.title}`);
  details.ontoggle = () => {
    if (!details.open || details.querySelector("table")) return;
    const rows = tableRows(chart);
    details.append(element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Numbers: ${chart.title}` },
      numberTable(`${chart.title}, ${chart.unit || "no unit"}`, rows)));
  };
  return details;
}

const lastOf = (chart, one) => {
  if (chart.kind === "bars") return String(one.values.reduce((sum, value) => sum + value, 0));
  return one.points.length ? format(one.points[one.points.length - 1][1]) : "–";
};

// A line of pass@k is read at its end, the largest k.
const legendOf = (chart, one) => {
  if (chart.x !== "k") return one.label;
  const end = `pass@${one.points[one.points.length - 1][0]}`;
  return one.label === "pass@k" ? end : `${one.label}, ${end}`;
};

function chartCard(chart) {
  const legend = element("div", { class: "legend" });
  (chart.series ?? []).forEach((one, index) => {
    const line = (chart.kind ?? "line") === "line" ? `border-top-style: ${dash(index)[1]}` : "border-top-width: 8px";
    legend.append(element("span", { style: color(one, index) }, element("i", { style: line }), legendOf(chart, one), element("b", { text: lastOf(chart, one) })));
  });
  if (chart.kind === "map") legend.append(element("span", { class: "ramp" }, "0 right", element("i"), "all right"));
  const card = element("figure", { class: "card chart" }, element("h3", {}, chart.title, " ", element("small", { text: chart.unit })),
    element("p", { class: "note", text: chart.note }), legend);
  const plot = element("div", { class: `plot ${chart.kind}`, tabindex: 0, role: "slider",
    "aria-label": `${chart.title}${chart.unit ? `, ${chart.unit}` : ""}, by ${chart.x}`, "aria-valuemin": 0 });
  shape("svg", { "aria-hidden": "true" }, plot);
  card.append(plot, tableBelow(chart));
  return card;
}

// Shows where the reader is in a chart: a mark, and next to it the numbers (only in the chart that is pointed at).
function showCursor(drawn, index, withTooltip) {
  drawn.cursor.replaceChildren();
  drawn.plot.querySelector(".tooltip")?.remove();
  drawn.index = index;
  if (index === null) return;
  drawn.mark(index, drawn.cursor);
  const lines = drawn.lines(index);
  drawn.plot.setAttribute("aria-valuenow", index);
  drawn.plot.setAttribute("aria-valuetext", `${drawn.heading(index)}: ${lines.map(([name, value]) => `${name} ${value}`).join(", ")}`);
  if (!withTooltip) return;
  const tooltip = element("div", { class: "tooltip" }, element("div", { text: drawn.heading(index) }));
  for (const [name, value, style] of lines) {
    tooltip.append(element("div", { style }, element("i"), name, element("b", { text: value })));
  }
  drawn.plot.append(tooltip);
  const at = drawn.place(index), room = drawn.plot.clientWidth - tooltip.offsetWidth - 4;
  tooltip.style.left = `${at + 14 < room ? at + 14 : Math.max(2, Math.min(room, at - tooltip.offsetWidth - 14))}px`;
  tooltip.style.top = "4px";
}

function follow(drawn, one, index) {
  for (const other of drawn) {
    const shared = index !== null && other !== one && other.chart.x === one.chart.x && other.chart.kind in { line: 1, stack: 1 }
      && one.chart.kind in { line: 1, stack: 1 };
    const there = shared ? nearest(other.stops, (stop) => Math.abs(stop - one.stops[index])) : null;
    showCursor(other, other === one ? index : there, other === one);
  }
}

function readable(drawn, one) {
  const { plot } = one, last = one.stops.length - 1;
  plot.setAttribute("aria-valuemax", last);
  plot.setAttribute("aria-valuenow", last);
  plot.setAttribute("aria-valuetext", "arrow keys read the values");
  plot.onpointermove = (event) => {
    const box = plot.getBoundingClientRect();
    follow(drawn, one, one.at(event.clientX - box.left, event.clientY - box.top));
  };
  plot.onpointerleave = () => follow(drawn, one, null);
  plot.onblur = () => follow(drawn, one, null);
  plot.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: one.vertical ? -1 : 1, ArrowDown: one.vertical ? 1 : -1, PageUp: 10, PageDown: -10 }[event.key];
    const now = one.index ?? (step > 0 ? -1 : last + 1);
    const next = { Home: 0, End: last }[event.key] ?? (step === undefined ? undefined : Math.max(0, Math.min(last, now + step)));
    if (event.key === "Escape") follow(drawn, one, null);
    if (next === undefined) return;
    event.preventDefault();
    follow(drawn, one, next);
  };
}

// Fills a holder with charts, side by side; their rollouts are one axis.
function showCharts(charts, holder) {
  holder.watched?.disconnect();
  const ends = charts.filter((chart) => !chart.log && chart.kind in { line: 1, stack: 1 }).flatMap(stopsOf);
  const span = ends.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
  if (span[0] === span[1]) span[1] += 1;
  const cards = charts.map(chartCard);
  holder.replaceChildren(...cards);
  const draw = () => {
    const drawn = [];
    charts.forEach((chart, i) => {
      const plot = cards[i].querySelector(".plot"), svg = plot.querySelector("svg");
      plot.querySelector(".tooltip")?.remove();
      drawn.push({ chart, plot, index: null, ...DRAW[chart.kind](chart, svg, span), cursor: shape("g", {}, svg) });
    });
    drawn.forEach((one) => readable(drawn, one));
  };
  draw();
  let width = holder.clientWidth;
  holder.watched = new ResizeObserver(() => { if (holder.clientWidth !== width) { width = holder.clientWidth; draw(); } });
  holder.watched.observe(holder);
  holder.redraw = draw;
}

// Counts in equal bins between the least and the largest value, whole numbers where all values are; null is left out.
function histogram(groups, most = 16) {
  const values = groups.flatMap((group) => group.values), low = Math.min(...values), high = Math.max(...values);
  const whole = values.every(Number.isInteger);
  const spread = high - low || (whole ? 1 : Math.abs(high) || 1);
  const width = whole ? Math.max(1, Math.ceil((spread + 1) / most)) : spread / most;
  const different = [...new Set(values)].sort((a, b) => a - b);
  if (different.length <= most && !whole) {  // such as rewards of 0, 0.5 and 1: a bar for each
    return { labels: different.map((value) => String(+value.toFixed(3))), series: groups.map((group) => ({ ...group,
      values: different.map((value) => group.values.filter((one) => one === value).length) })) };
  }
  const count = whole ? Math.floor((high - low) / width) + 1 : most;
  const bin = (value) => Math.min(count - 1, Math.floor((value - low) / width));
  const name = (i) => (whole ? (width === 1 ? String(low + i) : `${low + i * width}–${low + (i + 1) * width - 1}`) : `${+(low + i * width).toPrecision(3)}`);
  return { labels: Array.from({ length: count }, (_, i) => name(i)), series: groups.map((group) => {
    const counts = new Array(count).fill(0);
    group.values.forEach((value) => { counts[bin(value)] += 1; });
    return { ...group, values: counts };
  }) };
}
