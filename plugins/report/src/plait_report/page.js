// Shows the values of `report` (made by plait_report.page): draws the charts with plotly, sorts, filters and hides runs,
// and asks a live page's server for the next state. What the reader chose stands in the address after the #.
const $ = id => document.getElementById(id);
const all = (what, inside = document) => [...inside.querySelectorAll(what)];
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const read = page => JSON.parse(page.getElementById("report").textContent);
let report = read(document);
let state = { hidden: [], sort: null, down: false };
try { state = { ...state, ...JSON.parse(decodeURIComponent(location.hash.slice(1))) }; } catch { /* no choices yet */ }

const inputs = all("main input, main select");
const valueOf = input => input.type === "checkbox" ? input.checked : input.value;
for (const input of inputs) {
  if (!(input.name in state)) continue;
  if (input.type === "radio") input.checked = input.value === state[input.name];
  else if (input.type === "checkbox") input.checked = state[input.name];
  else if (input.tagName !== "SELECT" || all("option", input).some(option => option.value === state[input.name])) input.value = state[input.name];
}
function choose() {
  for (const input of inputs) if (input.type !== "radio" || input.checked) state[input.name] = valueOf(input);
  show();
}

const rows = () => all("#runs tbody tr");
const isShown = run => !state.hidden.includes(report.names[run]) && !rows().find(row => row.dataset.run == run).hidden;

function sortRows() {
  const heads = all("#runs thead th"), at = heads.findIndex(head => head.textContent === state.sort);
  heads.forEach((head, i) => i === at ? head.setAttribute("aria-sort", state.down ? "descending" : "ascending") : head.removeAttribute("aria-sort"));
  const cell = row => row.cells[at], empty = row => ["", "-"].includes(cell(row).textContent);
  const order = (a, b) => {
    if (at < 0) return a.dataset.run - b.dataset.run;
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    const [x, y] = [cell(a), cell(b)], both = x.dataset.value && y.dataset.value;
    const sign = both ? x.dataset.value - y.dataset.value : x.textContent.localeCompare(y.textContent, "en", { numeric: true });
    return state.down ? -sign : sign;
  };
  const focused = document.activeElement; // which a move takes away
  document.querySelector("#runs tbody").append(...rows().sort(order));
  focused.focus({ preventScroll: true });
}

function show() {
  const wanted = (state.filter || "").toLowerCase().split(/\s+/);
  sortRows();
  for (const row of rows()) {
    const run = row.dataset.run, button = $(`run-${run}`);
    row.hidden = !wanted.every(word => row.textContent.toLowerCase().includes(word));
    button.setAttribute("aria-pressed", !state.hidden.includes(report.names[run]));
    button.querySelector("svg").outerHTML = report.swatches[state.band ? report.leaders[run] : run];
  }
  const shown = report.names.map((_, run) => isShown(run));
  all("figure tr[data-run]").forEach(row => { row.hidden = !shown[row.dataset.run]; });
  $("shown").textContent = `${shown.filter(Boolean).length} of ${shown.length} shown`;
  const best = report.best.find(each => each.title === state.best);
  if (best) {
    $("best").textContent = best.sentence;
    rows().forEach(row => { row.querySelector(".best").hidden = !best.runs.includes(Number(row.dataset.run)); });
  }
  if ($("smoothing")) $("smoothing").textContent = state.smooth;
  cancelAnimationFrame(show.next);
  show.next = requestAnimationFrame(() => report.charts.forEach((chart, i) => draw(chart, `chart-${i}`, shown)));
  const address = "#" + encodeURIComponent(JSON.stringify(state));
  try { history.replaceState(null, "", address); } catch { /* Safari refuses more than 100 in 30 seconds */ }
}

// The running mean that weighs each older value by `weight` once more; it begins at the first value.
function smoothed(y, weight) {
  let mean = 0, count = 0;
  return y.map(value => {
    if (value === null) return null;
    count = count * weight + 1;
    return mean += (value - mean) / count; // so that equal values stay exactly what they are
  });
}

const valuesOf = (curve, weight) => weight && !curve.sparse ? smoothed(curve.mean || curve.y, weight) : curve.y;

// y of a curve at each of `xs`, on the line between its points; null before its first and after its last.
function along(xs, x, y) {
  const points = x.map((at, i) => [at, y[i]]).filter(point => point[1] !== null);
  let i = 0;
  return xs.map(at => {
    while (i + 1 < points.length && points[i + 1][0] <= at) i++;
    if (!points.length || at < points[0][0] || at > points.at(-1)[0]) return null;
    const [[a, left], [b, right]] = [points[i], points[i + 1] || points[i]];
    return b === a ? left : left + (right - left) * (at - a) / (b - a);
  });
}

function curveTraces(curve, axis, weight) {
  const look = report.looks[curve.run], x = curve.x[axis], y = valuesOf(curve, weight);
  const marker = { symbol: look.marker, size: 8, color: look.color, line: { width: 1.8, color: look.color } };
  const line = { color: look.color, width: curve.planned ? 1 : 1.8, dash: curve.planned ? "dot" : look.dash };
  const pointwise = curve.sparse || y.length === 1;
  const traces = [{ x, y, name: curve.name, mode: pointwise ? "lines+markers" : "lines", line, marker, opacity: curve.planned ? 0.7 : 1 }];
  if (weight && !pointwise) traces.unshift({ x, y: curve.y, mode: "lines", hoverinfo: "skip", opacity: 0.25, line: { ...line, width: 1, dash: "solid" } });
  if (!pointwise && !curve.planned) { // six markers, for each run at other places, so that equal curves show all of theirs
    const at = [0, 1, 2, 3, 4, 5].map(i => Math.floor((i + (curve.run * 0.382 + 0.2) % 1) * y.length / 6));
    traces.push({ x: at.map(i => x[i]), y: at.map(i => y[i]), mode: "markers", hoverinfo: "skip", marker });
  }
  return traces;
}

function bandTraces(curves, leader, axis, weight) {
  const { color } = report.looks[leader];
  const xs = [...new Set(curves.flatMap(curve => curve.x[axis]))].sort((a, b) => a - b);
  const ys = curves.map(curve => along(xs, curve.x[axis], valuesOf(curve, weight)));
  const each = what => xs.map((_, i) => ys.some(y => y[i] === null) ? null : what(ys.map(y => y[i])));
  const keep = each(() => true), kept = list => list.filter((_, i) => keep[i]), x = kept(xs);
  const [low, mean, high] = [values => Math.min(...values), values => values[0] + values.reduce((sum, y) => sum + y - values[0], 0) / values.length,
    values => Math.max(...values)].map(what => kept(each(what)));
  const edge = { x, mode: "lines", hoverinfo: "skip", line: { width: 0, color } };
  const rgb = [1, 3, 5].map(i => parseInt(color.slice(i, i + 2), 16)), names = curves.map(curve => curve.name).join(", ");
  const sparse = curves[0].sparse, middle = { run: leader, name: `mean of ${curves.length}: ${names}`, sparse, x: { [axis]: x }, y: mean };
  const bars = { type: "data", array: high.map((y, i) => y - mean[i]), arrayminus: mean.map((y, i) => y - low[i]), symmetric: false };
  return [
    { ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: `rgba(${rgb},0.25)` },
    ...curveTraces(middle, axis, 0).map(trace => sparse ? { ...trace, error_y: { ...bars, color } } : trace),
  ];
}

function draw(chart, id, shown) {
  const axis = state.x || "steps", weight = Number(state.smooth || 0), groups = new Map();
  for (const curve of chart.curves.filter(curve => shown[curve.run])) {
    const key = state.band && !curve.planned ? report.leaders[curve.run] : `${curve.run} ${curve.planned}`;
    groups.set(key, [...(groups.get(key) || []), curve]);
  }
  const traces = [...groups].flatMap(([leader, curves]) =>
    curves.length > 1 ? bandTraces(curves, leader, axis, weight) : curveTraces(curves[0], axis, weight));
  const lines = { gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true, exponentformat: "power" };
  Plotly.react(id, traces.map(trace => ({ type: "scatter", connectgaps: false, showlegend: false, ...trace })), {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style("--text"), size: 12 },
    margin: { l: 50, r: 34, t: 12, b: 40 }, hovermode: "x unified", hoverlabel: { bgcolor: style("--card"), namelength: 40 },
    xaxis: { ...lines, exponentformat: "SI", type: state.logx ? "log" : "linear", title: { text: report.axes[axis], standoff: 6 } },
    yaxis: { ...lines, type: state.logy ? "log" : "linear", title: { text: chart.unit, standoff: 10 } },
    uirevision: `${axis} ${state.logx} ${state.logy}`,
    modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: style("--dim"), activecolor: style("--text") },
  }, { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
}

// A page from a server gets the parts that changed; one from a disk is loaded again.
async function update() {
  if (location.protocol === "file:") return location.reload();
  let next;
  try {
    next = new DOMParser().parseFromString(await (await fetch("live")).text(), "text/html");
  } catch {
    $("live").textContent = "The server has ended; this is the last state that it sent. The file of the report has the last one.";
    return;
  }
  const parts = page => JSON.stringify([
    all("[data-live]", page).map(part => part.id), all("main input, option", page).map(choice => choice.name || choice.text),
    read(page).charts.map(chart => chart.key),
  ]);
  if (parts(next) !== parts(document)) return location.reload();
  report = read(next);
  const focused = document.activeElement.id || document.activeElement.dataset.sort;
  all("[data-live]").forEach(part => { part.innerHTML = next.getElementById(part.id).innerHTML; });
  show();
  ($(focused) || all("[data-sort]").find(button => button.dataset.sort === focused))?.focus({ preventScroll: true });
  wait();
}
function wait() {
  const now = new Date().toLocaleTimeString();
  if (report.refresh) setTimeout(update, 1000 * report.refresh);
  $("live").textContent = report.refresh ? `Live: as of ${now}, again every ${report.refresh} seconds.` : "";
}

inputs.forEach(input => input.addEventListener("input", choose));
document.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.id.startsWith("run-")) {
    const name = report.names[button.closest("tr").dataset.run];
    state.hidden = state.hidden.includes(name) ? state.hidden.filter(other => other !== name) : [...state.hidden, name];
  } else if (button.dataset.sort) {
    state.down = state.sort === button.dataset.sort && !state.down;
    state.sort = button.dataset.sort;
  } else state.hidden = button.id === "hide" ? report.names : [];
  show();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
choose();
wait();
