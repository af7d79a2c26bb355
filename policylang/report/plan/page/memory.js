// The chart: at most one point a pixel, each the most that was alive among the operators it stands for.
function showMemory() {
  const memory = data.memory;
  const length = memory.names.length;
  if (!length) { byId("memory").append("Nothing runs in this graph."); return; }
  const width = 1400, height = 300, left = 64, right = 12, top = 12, bottom = 24;
  const most = Math.max(1, ...[memory.under, memory.without].map((curve) => curve.reduce((a, b) => Math.max(a, b), 0)));
  const tick = niceStep(most / 4);
  const ceiling = Math.ceil(most / tick) * tick;
  const x = (at) => left + ((width - left - right) * (at + 0.5)) / length;
  const y = (value) => top + (height - top - bottom) * (1 - value / ceiling);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "application", tabindex: "0", "aria-label":
    `memory over the step: the peak under the policy is ${bytes(data.under.peak.forward > data.under.peak.backward ? data.under.peak.forward : data.under.peak.backward)} at ${data.under.peak.at}` });

  for (let value = 0; value <= ceiling; value += tick) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, bytes(value)));
  }
  svg.append(draw("path", { class: "without", d: outline(memory.without, x, y, width - left - right) }));
  svg.append(draw("path", { class: "under", d: outline(memory.under, x, y, width - left - right) }));
  svg.append(draw("line", { class: "resident", x1: left, x2: width - right, y1: y(memory.resident), y2: y(memory.resident) }));
  const parting = memory.backward.indexOf(1);
  if (parting > 0) {
    svg.append(draw("line", { class: "parting", x1: x(parting - 0.5), x2: x(parting - 0.5), y1: top, y2: height - bottom }));
    svg.append(draw("text", { x: x(parting - 0.5) - 8, y: height - 8, "text-anchor": "end" }, "forward"));
    svg.append(draw("text", { x: x(parting - 0.5) + 8, y: height - 8 }, "backward"));
  }
  const worst = memory.under.indexOf(memory.under.reduce((a, b) => Math.max(a, b), 0));
  svg.append(draw("circle", { class: "peak", cx: x(worst), cy: y(memory.under[worst]), r: 4 }));
  const cursor = svg.appendChild(draw("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" }));

  const told = make("span", { class: "told", role: "status" });
  let at = worst;
  function tell(place) {
    at = Math.min(length - 1, Math.max(0, place));
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(at));
    cursor.setAttribute("visibility", "visible");
    const block = memory.block[at] >= 0 ? ` in ${data.blocks[memory.block[at]]}` : "";
    told.textContent = `${memory.names[at]}${block}: ${bytes(memory.under[at])}, without ${bytes(memory.without[at])}`;
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * width;
    tell(Math.floor(((inside - left) / (width - left - right)) * length));
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -Math.ceil(length / 50), PageDown: Math.ceil(length / 50) }[event.key];
    if (step) tell(at + step);
    else if (event.key === "Home") tell(0);
    else if (event.key === "End") tell(length - 1);
    else return;
    event.preventDefault();
  });
  const entry = (color, name, scenario) => make("span", {},
    make("i", { class: "key", style: `background: var(--${color})` }), `${name}: `, make("b", {}, bytes(Math.max(scenario.peak.forward, scenario.peak.backward))));
  const legend = make("div", { class: "legend" },
    entry("saved", "peak under the policy", data.under), entry("without", "peak when nothing is recomputed", data.without),
    make("span", {}, "dotted: parameters, buffers and inputs, ", make("b", {}, bytes(memory.resident))), told);
  byId("memory").append(svg, legend);
}

function niceStep(value) {
  let step = 1;
  while (step * 2 <= value) step *= 2;
  return step;
}

function outline(curve, x, y, pixels) {
  const points = [];
  const width = Math.max(1, Math.ceil(curve.length / pixels));
  for (let start = 0; start < curve.length; start += width) {
    let at = start;
    for (let each = start; each < Math.min(curve.length, start + width); each += 1) if (curve[each] > curve[at]) at = each;
    points.push(`${x(at).toFixed(1)},${y(curve[at]).toFixed(1)}`);
  }
  return `M${x(0)},${y(0)}L${points.join("L")}L${x(curve.length - 1)},${y(0)}Z`;
}
