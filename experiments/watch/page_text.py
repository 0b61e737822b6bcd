"""The page of `watch`: its script requests the view at intervals and draws it."""

from experiments.report.html_page import base_style

PAGE = (
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<link rel="icon" href="data:,"><title>watch</title><style>
"""
    + base_style()
    + """
main{max-width:1100px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.4rem;line-height:1.25;margin:.2em 0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:1.4em 0 .4em}p{margin:.3em 0}.dim{color:var(--dim);font-size:.9rem}
#alarms{list-style:none;margin:.8em 0;padding:0}
#alarms li{padding:6px 12px;margin:4px 0;border-radius:6px;border:1px solid var(--edge);
background:var(--card);border-left:6px solid #d6404a;font-weight:600}
#alarms li.well{border-left-color:#12843f;font-weight:400}
progress{width:100%;height:10px}
table{border-collapse:collapse;min-width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--edge)}
figure{overflow-x:auto}svg{display:block;width:100%;min-width:640px;height:auto}
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
const by = (id) => document.getElementById(id);
const words = (id, text) => { by(id).textContent = text; };

function shown(view) {
  document.title = `${view.done}/${view.steps} ${view.name}`;
  words("name", view.name);
  words("about", view.heading[0].slice(view.name.length + 2));
  by("done").max = view.steps || 1;
  by("done").value = view.done;
  words("state", view.heading[1]);
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
  for (const [id, svg] of Object.entries(view.pictures)) by(id).innerHTML = svg;
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
    head.style.color = `var(--s${row.region % 8})`;
    line.append(head, ...names.map((name) => cell("td", view.table[name][i])));
    return line;
  }));
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
