// The blocks, alike ones folded; the values of a group are made when it is opened.
function showBlocks() {
  const box = byId("blocks");
  const most = (name) => Math.max(1, ...data.groups.map((group) => group.amounts[name]));
  const mostSaved = most("saved_bytes"), mostFlops = most("recomputed_flops");
  data.groups.forEach((group, at) => {
    const amounts = group.amounts;
    const label = make("span", { class: "label" }, group.label);
    if (group.times > 1) label.append(make("span", { class: "times" }, `×${group.times}`));
    const open = amounts.open_bytes ? `, ${bytes(amounts.open_bytes)} of it left to PyTorch` : "";
    const moved = amounts.offloaded ? `, ${bytes(amounts.offloaded_bytes)} offloaded` : "";
    const summary = make("summary", {}, label,
      measure(amounts.saved_bytes / mostSaved, "saved", bytes(amounts.saved_bytes), ` saved in ${count(amounts.saved, "value")}${open}${moved}`),
      measure(amounts.recomputed_flops / mostFlops, "recomputed", flops(amounts.recomputed_flops), ` and ${bytes(amounts.recomputed_bytes)} recomputed in ${count(amounts.recomputed, "value")}`));
    const details = make("details", { class: "group" }, summary);
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(entriesTable(data.entries[at]));
    });
    box.append(details);
  });
}

function measure(share, color, figure, rest) {
  return make("span", {},
    make("span", { class: "amount" }, make("b", {}, figure), rest),
    make("div", { class: "bar" }, make("i", { style: `width: ${(100 * share).toFixed(1)}%; background: var(--${color})` })));
}

function entriesTable(entries) {
  const table = make("table");
  const names = ["", "operator", "module", "shape", "bytes", "FLOPs again", "decided by"];
  const numeric = new Set([4, 5]);
  table.append(make("thead", {}, make("tr", {}, ...names.map((name, at) => make("th", { scope: "col", class: numeric.has(at) ? "number" : "" }, name)))));
  const views = entries.filter((entry) => entry.fate === "recomputed" && !entry.bytes && !entry.flops && !entry.uncounted);
  const body = make("tbody");
  for (const entry of entries) {
    if (views.includes(entry)) continue;
    body.append(make("tr", {},
      make("td", { class: `fate fate-${spoken(entry.fate)}` }, entry.fate),
      make("td", { class: "mono" }, entry.operator + (entry.count > 1 ? ` ×${entry.count}` : "")),
      make("td", { class: "mono" }, entry.module),
      make("td", { class: "mono" }, [(entry.shape || []).join("×"), entry.dtype].join(" ")),
      make("td", { class: "number" }, entry.bytes ? bytes(entry.bytes) : ""),
      make("td", { class: "number" }, entry.flops ? flops(entry.flops) : entry.uncounted ? "not counted" : ""),
      make("td", {}, entry.source || entry.reason || "undecided")));
  }
  table.append(body);
  const box = make("div", { class: "scroll" }, table);
  const hidden = views.reduce((sum, entry) => sum + entry.count, 0);
  if (hidden) box.append(make("p", { class: "hint" }, `and ${count(hidden, "view")} and parts that are recomputed at no cost`));
  return box;
}
