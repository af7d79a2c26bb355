// Figures as the reports in the terminal print them, and the few ways in which elements are made: text only, no markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function scaled(value, base, units) {
  let at = 0;
  let left = Math.abs(value);
  while (at + 1 < units.length && Math.round(left * 10) / 10 >= base) { left /= base; at += 1; }
  return `${value < 0 ? "−" : ""}${left.toFixed(1).replace(/\.0$/, "")} ${units[at]}`;
}
const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const flops = (value) => scaled(value, 1000, ["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]);
const times = (value) => (value ? scaled(value * 1e9, 1000, ["ns", "us", "ms", "s"]) : "0 s");
const signed = (value, figure) => (value > 0 ? "+" : "") + figure(value);
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "");
const number = (value) => value.toLocaleString("en-US");
const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
const spoken = (fate) => fate.replaceAll(" ", "-");

function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") element.className = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function draw(tag, options = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(options)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

// The cursor in the chart: by pointer, or with the arrow keys. The chart itself is part of the page.
function showMemory() {
  const memory = data.memory;
  const length = memory.names.length;
  const svg = document.querySelector("#memory svg");
  if (!svg) return;
  const told = document.querySelector("#memory .told");
  const cursor = svg.appendChild(draw("line", { class: "cursor", y1: 0, y2: 1000, visibility: "hidden" }));
  const [first, second] = memory.curves;
  let at = first.moments.reduce((best, value, place) => (value > first.moments[best] ? place : best), 0);
  // From here on it is a thing to move along; what it shows is said where it stands.
  for (const [name, value] of Object.entries({ role: "slider", "aria-valuemin": 1, "aria-valuemax": length })) svg.setAttribute(name, value);
  function place(to) {
    at = Math.min(length - 1, Math.max(0, to));
    const inBlock = memory.block.values[memory.block.codes[at]];
    const words = `${memory.names[at]}${inBlock ? ` in ${inBlock}` : ""}: ${bytes(first.moments[at])}, ${second.name.replace(/^peak /, "")} ${bytes(second.moments[at])}${memory.host.length ? `, on the host ${bytes(memory.host[at])}` : ""}`;
    svg.setAttribute("aria-valuenow", at + 1);
    svg.setAttribute("aria-valuetext", words);
    return words;
  }
  function tell(to) {
    told.textContent = place(to);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, (1000 * (at + 0.5)) / length);
    cursor.setAttribute("visibility", "visible");
  }
  place(at);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    tell(Math.floor(((event.clientX - box.left) / box.width) * length));
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: -Math.ceil(length / 50), PageDown: Math.ceil(length / 50) }[event.key];
    if (step) tell(at + step);
    else if (event.key === "Home") tell(0);
    else if (event.key === "End") tell(length - 1);
    else return;
    event.preventDefault();
  });
}

// The text of the policy, file by file. The first line of a rule is a button.
const ruleRows = data.rules.map(() => []);

function showPolicy(choose) {
  const box = byId("policy");
  data.sources.forEach((source, file) => {
    const starts = new Map();
    const inside = new Map();
    data.rules.forEach((rule, index) => {
      if (rule.file !== file) return;
      if (!starts.has(rule.line)) starts.set(rule.line, []);
      starts.get(rule.line).push(index);
      for (let line = rule.line; line <= rule.end; line += 1) inside.set(line, index);
    });
    const text = make("div", { class: "text" });
    source.lines.forEach((line, at) => {
      const rules = starts.get(at + 1) || [];
      if (rules.length > 1) { // several on one line: the line as it stands, then a button each
        text.append(plainRow(at + 1, line));
        for (const index of rules) text.append(ruleRow("", data.rules[index].text, index, choose));
      } else if (rules.length === 1) text.append(ruleRow(at + 1, line, rules[0], choose));
      else text.append(plainRow(at + 1, line, inside.get(at + 1), data.notes.find((note) => note.file === file && note.line === at + 1)));
    });
    box.append(make("div", { class: "file" }, source.name), text);
  });
  const first = data.rules.findIndex((rule) => rule.file === 0);
  if (first >= 0) intoView(box, ruleRows[first][0].firstElementChild); // past the comment at the head of the file
}

function ruleRow(no, line, index, choose) {
  const rule = data.rules[index];
  const button = make("button", { class: "line", type: "button", "aria-pressed": "false", "data-rule": index, on: { click: () => choose(index) } });
  appendLine(button, line);
  const row = make("div", { class: "row rule" }, make("span", { class: "no" }, String(no)), button, make("span", { class: "note", title: worthTitle(rule) }, ruleNote(rule)));
  ruleRows[index].push(row);
  return row;
}

function plainRow(no, line, index, note) {
  const text = make("span", { class: "line" });
  appendLine(text, line);
  const said = note ? make("span", { class: "note", title: note.title }, note.note) : make("span", { class: "note" });
  const row = make("div", { class: "row" }, make("span", { class: "no" }, String(no)), text, said);
  if (index !== undefined) { row.classList.add("rule"); ruleRows[index].push(row); }
  return row;
}

function appendLine(parent, line) {
  const at = line.indexOf("#");
  if (at < 0) parent.append(line || " ");
  else parent.append(line.slice(0, at), make("span", { class: "comment" }, line.slice(at)));
}

function ruleNote(rule) {
  if (!rule.matched.length) return "no match";
  if (!rule.decided) return `0 of ${number(rule.matched.length)}`;
  const decided = rule.decided === rule.matched.length ? number(rule.decided) : `${number(rule.decided)} of ${number(rule.matched.length)}`;
  return rule.worth && rule.worth.saved_bytes ? `${decided} · ${signed(rule.worth.saved_bytes, bytes)}` : decided;
}

function worthTitle(rule) {
  if (!rule.worth) return "";
  const worth = rule.worth;
  const inTime = worth.recomputed_seconds !== null;
  const price = inTime ? worth.seconds_per_gib && times(worth.seconds_per_gib) : worth.flops_per_gib && flops(worth.flops_per_gib);
  const again = inTime ? ` in ${signed(worth.recomputed_seconds, times)}` : "";
  return `It ${worth.verdict}: ${signed(worth.saved_bytes, bytes)} saved, ${signed(worth.recomputed_flops, flops)} recomputed${again}, ` +
    `${signed(worth.peak_bytes, bytes)} at the peak, compared with the policy without this rule${price ? `, ${price} a GiB` : ""}`;
}

function markRules(active, matching, deciding) {
  data.rules.forEach((rule, index) => {
    for (const row of ruleRows[index]) {
      row.classList.toggle("active", index === active);
      row.classList.toggle("matching", matching.includes(index));
      row.classList.toggle("deciding", index === deciding);
      const button = row.querySelector("button");
      if (button) button.setAttribute("aria-pressed", String(index === active));
    }
  });
  const first = active !== null ? active : deciding >= 0 ? deciding : matching[0];
  const row = first === undefined ? null : ruleRows[first][0];
  if (row) intoView(byId("policy"), row.firstElementChild);
}

function intoView(box, element) { // without moving the page
  const inner = element.getBoundingClientRect(), outer = box.getBoundingClientRect();
  if (inner.top < outer.top + 30 || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - outer.height / 3;
}

// Every forward value. Only the rows in sight exist: a graph may have a million of them.
const nodes = data.nodes;
const ROW = 26;
const OVERSCAN = 8;
const TALLEST = 10_000_000; // browsers clip elements beyond some 16 million pixels
const cell = (column, row) => nodes[column].values[nodes[column].codes[row]];
const timed = nodes.seconds.length > 0; // there is a device
const timeOf = (row) => (timed && nodes.seconds[row] >= 5e-11 ? times(nodes.seconds[row]) : "");
const rulesOf = new Map(); // owner → the rules that match it, in order
data.rules.forEach((rule, index) => {
  for (const owner of rule.matched) {
    if (!rulesOf.has(owner)) rulesOf.set(owner, []);
    rulesOf.get(owner).push(index);
  }
});
const list = { shown: [], active: -1, rule: null, fate: "", words: "", choose: null };

function showNodes(choose, clear) {
  list.choose = choose;
  const fates = [["", "every value"], ["saved", "saved"], ["left to PyTorch", "left to PyTorch"], ["recomputed", "recomputed"], ["offloaded", "offloaded"], ["none", "not needed by the backward"]];
  const search = make("input", { type: "search", placeholder: "name, operator or module", "aria-label": "filter by name, operator or module", id: "search" });
  const select = make("select", { "aria-label": "filter by what becomes of a value", id: "fate" });
  for (const [value, label] of fates) select.append(make("option", { value }, label));
  search.addEventListener("input", () => { list.words = search.value.trim().toLowerCase(); refresh(); });
  select.addEventListener("change", () => { list.fate = select.value; refresh(); });
  const all = make("button", { type: "button", id: "all", on: { click: () => {
    search.value = select.value = list.words = list.fate = "";
    clear();
  } } }, "Show all");
  byId("filters").append(search, select, all);
  byId("values").classList.toggle("timed", timed);
  byId("head").append(...["", "value", "module", "bytes", "FLOPs", ...(timed ? ["time"] : [])].map((name, at) => make("span", { class: at > 2 ? "number" : "", style: at > 2 ? "text-align: right" : "" }, name)));
  const box = byId("list");
  box.addEventListener("scroll", paint, { passive: true });
  box.addEventListener("keydown", walk);
  new ResizeObserver(paint).observe(box);
  refresh();
}

function refresh() {
  const groups = list.rule === null ? null : new Set(data.rules[list.rule].matched);
  const hits = (column) => nodes[column].values.map((value) => String(value).toLowerCase().includes(list.words));
  const operators = hits("operator"), modules = hits("module");
  list.shown = [];
  for (let row = 0; row < nodes.name.length; row += 1) {
    if (groups && !groups.has(nodes.owner[row])) continue;
    const fate = cell("fate", row);
    if (list.fate && (list.fate === "none" ? fate !== "" : fate !== list.fate)) continue;
    if (list.words && !operators[nodes.operator.codes[row]] && !modules[nodes.module.codes[row]] && !nodes.name[row].toLowerCase().includes(list.words)) continue;
    list.shown.push(row);
  }
  byId("runway").style.height = `${Math.min(list.shown.length * ROW, TALLEST)}px`;
  byId("list").scrollTop = 0;
  tellChosen();
  paint();
}

function tellChosen() {
  const box = byId("chosen");
  box.replaceChildren();
  const total = list.shown.reduce((sum, row) => sum + (nodes.owner[row] === row ? 1 : 0), 0);
  if (list.rule === null) { box.append(`${count(list.shown.length, "value")} of ${number(nodes.name.length)}`); return; }
  const rule = data.rules[list.rule];
  box.append(make("b", {}, rule.text), ` (${rule.source}) matches ${count(total, "decision")} in ${count(list.shown.length, "value")} and decides ${number(rule.decided)}. ${worthTitle(rule)}`);
}

// Beyond TALLEST the rows are packed denser than they are drawn: a scroll position stands for a share of the list.
function firstRow(box) {
  const whole = list.shown.length * ROW;
  if (whole <= TALLEST) return box.scrollTop / ROW;
  return (box.scrollTop / Math.max(1, TALLEST - box.clientHeight)) * (list.shown.length - box.clientHeight / ROW);
}

function paint() {
  const box = byId("list");
  const first = firstRow(box);
  const from = Math.max(0, Math.floor(first) - OVERSCAN);
  const to = Math.min(list.shown.length, Math.ceil(first + box.clientHeight / ROW) + OVERSCAN);
  const rows = [];
  for (let at = from; at < to; at += 1) rows.push(valueRow(at, box.scrollTop + (at - first) * ROW));
  byId("runway").replaceChildren(...rows);
  const active = list.shown.indexOf(list.active);
  if (active >= from && active < to) box.setAttribute("aria-activedescendant", `value-${list.active}`);
  else box.removeAttribute("aria-activedescendant");
}

function valueRow(at, top) {
  const row = list.shown[at];
  const fate = cell("fate", row);
  const lost = list.rule !== null && nodes.rule[row] !== list.rule;
  const what = fate || "not needed by the backward";
  return make("div", { class: `value${row === list.active ? " active" : ""}${lost ? " lost" : ""}`, role: "option", id: `value-${row}`, "aria-selected": String(row === list.active),
      "aria-posinset": at + 1, "aria-setsize": list.shown.length, "data-name": nodes.name[row], style: `top: ${top}px`, title: `${what}${lost ? ", by another line" : ""}${timeOf(row) ? `; one run takes ${timeOf(row)} on ${data.device}` : ""}`, on: { click: () => list.choose(row) } },
    make("span", { class: `dot dot-${spoken(fate)}`, "aria-label": what }),
    make("span", { class: "mono" }, nodes.name[row]), make("span", {}, cell("module", row)),
    make("span", { class: "number" }, nodes.bytes[row] ? bytes(nodes.bytes[row]) : ""), make("span", { class: "number" }, nodes.flops[row] ? flops(nodes.flops[row]) : cell("uncounted", row) ? "not counted" : ""),
    ...(timed ? [make("span", { class: "number" }, timeOf(row))] : []));
}

function walk(event) {
  const page = Math.floor(byId("list").clientHeight / ROW) - 1;
  const step = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity }[event.key];
  if (step === undefined || !list.shown.length) return;
  event.preventDefault();
  const now = list.shown.indexOf(list.active);
  const at = Math.min(list.shown.length - 1, Math.max(0, now < 0 && Math.abs(step) < Infinity ? 0 : now + step));
  list.choose(list.shown[at]);
  bringIntoView(at);
}

function bringIntoView(at) {
  const box = byId("list");
  const first = firstRow(box), fits = box.clientHeight / ROW;
  if (at < first || at + 1 > first + fits) {
    const wanted = at < first ? at : at + 1 - fits;
    const whole = list.shown.length * ROW;
    box.scrollTop = whole <= TALLEST ? wanted * ROW : (wanted / Math.max(1, list.shown.length - fits)) * (TALLEST - box.clientHeight);
  }
  paint();
}

const placeOf = (rule) => (data.sources.length > 1 ? rule.source : `line ${rule.line}`);

function standing(rule, row) {
  if (nodes.rule[row] === rule) return "decides";
  if (nodes.always[row]) return "a size is always saved";
  if (nodes.rule[row] < 0) return "the user's own checkpoint keeps it";
  return `overridden by ${placeOf(data.rules[nodes.rule[row]])}`;
}

function showDetail(row, choose) {
  const box = byId("detail");
  const fate = cell("fate", row);
  const rules = rulesOf.get(nodes.owner[row]) || [];
  const facts = [cell("operator", row), cell("shape", row) && `${cell("shape", row)} ${cell("dtype", row)}`, bytes(nodes.bytes[row]), nodes.flops[row] && flops(nodes.flops[row]), cell("uncounted", row) && "FLOPs not counted", timeOf(row) && `${timeOf(row)} on ${data.device}`];
  box.replaceChildren(
    make("h3", {}, nodes.name[row]),
    make("p", {}, facts.filter(Boolean).join(" · "), cell("module", row) ? ` · in ${cell("module", row)}` : ""),
    make("p", {}, make("span", { class: `fate fate-${spoken(fate)}` }, fate || "not needed by the backward"),
      ` · decided ${cell("action", row)}${cell("reason", row) ? `: ${cell("reason", row)}` : ""}` +
      (nodes.owner[row] !== row ? ` · one decision with ${nodes.name[nodes.owner[row]]}` : "")));
  if (!rules.length) { box.append(make("p", { class: "hint" }, "No rule matches it.")); return; }
  const found = make("ol");
  for (const rule of rules) {
    const decides = nodes.rule[row] === rule;
    found.append(make("li", { class: decides ? "" : "no-decision" },
      make("button", { type: "button", class: "choose", "data-rule": rule, on: { click: () => choose(rule) } }, `${placeOf(data.rules[rule])}: ${data.rules[rule].text}`),
      make("span", { class: "hint" }, standing(rule, row))));
  }
  box.append(found);
}

// What is chosen: a rule, a value, or both. Escape.
function chooseRule(rule) {
  list.rule = list.rule === rule ? null : rule;
  list.active = -1;
  byId("detail").replaceChildren();
  markRules(list.rule, [], -1);
  refresh();
}

function chooseNode(row) {
  list.active = row;
  markRules(list.rule, rulesOf.get(nodes.owner[row]) || [], nodes.rule[row]);
  showDetail(row, (rule) => { if (list.rule !== rule) chooseRule(rule); });
  paint();
}

function clearChoice() {
  list.rule = null;
  list.active = -1;
  byId("detail").replaceChildren();
  markRules(null, [], -1);
  refresh();
}

showMemory();
showPolicy(chooseRule);
showNodes(chooseNode, clearChoice);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") clearChoice(); });
