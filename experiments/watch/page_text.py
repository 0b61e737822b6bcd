"""The page of `watch`: its script requests the view at intervals and draws it."""

from experiments.report.html_page import colours

PAGE = (
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<link rel="icon" href="data:,"><title>watch</title><style>
"""
    + colours()
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1100px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.4rem;line-height:1.25;margin:.2em 0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:1.4em 0 .4em}p{margin:.3em 0}.dim{color:var(--dim);font-size:.9rem}
#alarms{list-style:none;margin:.8em 0;padding:0}
#alarms li{padding:6px 12px;margin:4px 0;border-radius:6px;border:1px solid var(--edge);
background:var(--card);border-left:6px solid #d6404a;font-weight:600}
#alarms li.well{border-left-color:#12843f;font-weight:400}
progress{width:100%;height:10px}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--edge);border-radius:8px}
table{border-collapse:collapse;min-width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--edge)}
tbody tr:last-child>*{border-bottom:0}
figure{margin:0;padding:10px 12px;background:var(--card);border:1px solid var(--edge);
border-radius:8px}
figure{overflow-x:auto}svg{display:block;width:100%;min-width:640px;height:auto}
svg text{fill:var(--dim);font:12px system-ui,sans-serif}
.grid{stroke:var(--grid);fill:none}.line{fill:none;stroke-width:1.6;stroke-linejoin:round}
.anchor{stroke:var(--ink);stroke-width:2.4}.lane{fill:var(--grid)}
.flight{fill:#1d9463}.open{fill:#1d9463;opacity:.45}.lost{fill:#d6404a}.mark{fill:var(--ink)}
.keys{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.875rem}
.keys i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
</style></head><body><main>
<h1 id="name">...</h1><p id="about" class="dim"></p>
<progress id="done" max="1" value="0"></progress>
<p id="state"></p><ul id="alarms"></ul>
<h2>Regions</h2><div class="scroll"><table><thead><tr id="head"></tr></thead>
<tbody id="rows"></tbody></table></div><p id="links" class="dim"></p>
<h2>Loss</h2><figure id="loss"></figure>
<h2>Sends and landings</h2><figure id="timeline"></figure>
</main><script>
"use strict";
const SPACE = "http://www.w3.org/2000/svg";
const by = (id) => document.getElementById(id);
const draw = (parent, kind, attributes, text) => {
  const part = document.createElementNS(SPACE, kind);
  for (const [name, value] of Object.entries(attributes)) part.setAttribute(name, value);
  if (text !== undefined) part.textContent = text;
  parent.append(part);
  return part;
};
const picture = (id, width, height, label) => {
  const svg = document.createElementNS(SPACE, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  by(id).replaceChildren(svg);
  return svg;
};
const seconds = (s) => s < 60 ? `${Math.round(s)} s` : s < 3600
  ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`
  : `${Math.floor(s / 3600)} h ${Math.round(s % 3600 / 60)} min`;
const ticks = (low, high, most) => {
  const unit = 10 ** Math.floor(Math.log10((high - low) / most || 1));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((s) => (high - low) / s <= most);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
};
const colour = (region) => `var(--s${region % 8})`;
const words = (id, text) => { by(id).textContent = text; };

function shown(view) {
  document.title = `${view.step}/${view.steps} ${view.name}`;
  words("name", view.name);
  words("about", `${view.method}, ${view.regions_of_run} regions, `
    + `${view.jobs ? "one job per region" : "one process"}, corpus ${view.corpus}`);
  by("done").max = view.steps || 1;
  by("done").value = view.step;
  let state = `step ${view.step} of ${view.steps}`;
  if (view.complete) state += ", complete";
  else if (view.left_s !== null) state += `, about ${seconds(view.left_s)} left`;
  if (view.tokens_per_second) state += `; ${Math.round(view.tokens_per_second)} tokens/s`;
  if (view.eval.step !== null) state += `; eval loss of the anchor `
    + `${view.eval.loss === null ? "not finite" : view.eval.loss.toFixed(4)} `
    + `at step ${view.eval.step}`;
  if (!view.complete) state += `; last record ${seconds(view.age_s)} ago`;
  words("state", state);
  const alarms = view.alarms.length ? view.alarms : ["no alarms"];
  by("alarms").replaceChildren(...alarms.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    item.className = view.alarms.length ? "" : "well";
    return item;
  }));
  table(view);
  words("links", view.network
    ? `Of its way out, and waits: on the virtual clock of ${view.network}.` : "");
  loss(view);
  timeline(view);
}

function table(view) {
  const cell = (kind, text) => {
    const found = document.createElement(kind);
    found.textContent = text;
    return found;
  };
  const names = Object.keys(view.table);
  by("head").replaceChildren(...["region", ...names].map((name) => cell("th", name)));
  by("rows").replaceChildren(...view.regions.map((row, i) => {
    const line = document.createElement("tr");
    const head = cell("th", row.region);
    head.style.color = colour(row.region);
    line.append(head, ...names.map((name) => cell("td", view.table[name][i])));
    return line;
  }));
}

function loss(view) {
  const [width, height, left, bottom] = [900, 260, 60, 220];
  const svg = picture("loss", width, height, "training loss of the regions and eval loss");
  const curves = view.regions.map((row) => [row.curve, colour(row.region), "line"]);
  curves.push([view.eval.curve, "var(--ink)", "line anchor"]);
  const late = curves.map(([points]) => points.filter(([step]) => step > 0.05 * view.step));
  const all = late.flat();
  if (!all.length) return draw(svg, "text", {x: left, y: 40}, "nothing yet");
  const [low, top] = [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  const high = top > low ? top : low + 1;
  const x = (step) => left + (width - left - 10) * step / view.steps;
  const y = (value) => bottom - (bottom - 10) * (value - low) / (high - low);
  for (const value of ticks(low, high, 5)) {
    draw(svg, "path", {class: "grid", d: `M${left} ${y(value)}H${width - 10}`});
    draw(svg, "text", {x: left - 6, y: y(value) + 4, "text-anchor": "end"},
      String(+value.toPrecision(3)));
  }
  for (const step of ticks(0, view.steps, 6)) {
    draw(svg, "text", {x: Math.min(x(step), width - 24), y: bottom + 18,
      "text-anchor": "middle"}, String(step));
  }
  draw(svg, "text", {x: (left + width) / 2, y: bottom + 36, "text-anchor": "middle"},
    "steps; coloured: training loss of a region, dark: eval loss of the anchor");
  late.forEach((points, i) => {
    if (!points.length) return;
    const d = points.map(([a, b]) => `${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("L");
    const line = draw(svg, "path", {class: curves[i][2], d: `M${d}`});
    if (i < view.regions.length) line.style.stroke = curves[i][1];
  });
}

function timeline(view) {
  const {first, last, flights} = view.timeline;
  const lane = 34, rows = view.regions.length, [width, left] = [900, 60];
  const bottom = 8 + lane * rows, height = bottom + 44;
  const svg = picture("timeline", width, height, "sends and landings of the last steps");
  if (!flights.length) return draw(svg, "text", {x: left, y: 24}, "nothing has been sent yet");
  const one = (width - left - 10) / (last - first + 1);
  const x = (step) => left + (step - first) * one;
  view.regions.forEach((row, i) => {
    const y = 8 + lane * i;
    draw(svg, "text", {x: left - 8, y: y + 20, "text-anchor": "end"}, String(row.region));
    const made = Math.max(0, Math.min(row.step, last) - first + 1) * one;
    draw(svg, "rect", {class: "lane", x: left, y: y + 6, width: made, height: lane - 12});
    const own = flights.filter((flight) => flight.region === row.region);
    for (const flight of own) {
      const from = Math.max(first, flight.sent);
      const to = flight.landed === null ? row.step + 1 : flight.landed;
      const kind = !flight.counted ? "lost" : flight.landed === null ? "open" : "flight";
      const sub = flight.fragment % 3;
      const bar = draw(svg, "rect", {class: kind, x: x(from) + one / 2, y: y + 8 + 6 * sub,
        width: Math.max(2, x(to) - x(from)), height: 5});
      draw(bar, "title", {}, `fragment ${flight.fragment}: sent after step ${flight.sent}, `
        + (flight.landed === null ? "under way" : `landed after step ${flight.landed}`)
        + (flight.counted ? "" : ", not counted"));
      if (flight.landed !== null) draw(svg, "rect",
        {class: "mark", x: x(flight.landed) + one / 2, y: y + 4, width: 1.2, height: lane - 8});
    }
  });
  for (const step of ticks(first, last, 8).filter(Number.isInteger)) {
    draw(svg, "text", {x: Math.min(x(step) + one / 2, width - 24), y: bottom + 16,
      "text-anchor": "middle"}, String(step));
  }
  draw(svg, "text", {x: (left + width) / 2, y: bottom + 36, "text-anchor": "middle"},
    "inner steps; green: sent and under way, dark line: landed, red: not counted");
}

async function look() {
  try {
    const answer = await fetch("view.json");
    if (!answer.ok) throw new Error(await answer.text());
    shown(await answer.json());
  } catch (error) {
    words("state", `no view: ${error.message}`);
  }
}
look();
setInterval(look, EVERY_MS);
</script></body></html>
"""
)
