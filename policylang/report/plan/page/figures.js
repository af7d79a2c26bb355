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
