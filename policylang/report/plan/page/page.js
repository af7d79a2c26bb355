// What is chosen: a rule, a value, or both. Escape lets go.
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

function letGo() {
  list.rule = null;
  list.active = -1;
  byId("detail").replaceChildren();
  markRules(null, [], -1);
  refresh();
}

function tile(name, figure, rest) {
  return make("div", {}, make("dt", {}, name), make("dd", { class: "big" }, figure), make("dd", { class: "small" }, rest));
}

function showHead() {
  const under = data.under, without = data.without;
  const peak = (scenario) => Math.max(scenario.peak.forward, scenario.peak.backward);
  const open = under.amounts.open_bytes;
  byId("title").textContent = `${data.policy} on ${data.graph}`;
  byId("subtitle").textContent = [`${data.kind} graph of ${count(data.total_nodes, "node")}`, `${count(nodes.name.length, "forward value")}`,
    data.blocks.length ? count(data.blocks.length, "block") : "no blocks", data.torch && `torch ${data.torch}`, `plan ${data.digest.slice(0, 12)}`].filter(Boolean).join(" · ");
  const share = data.forward_flops ? `${percent(under.amounts.recomputed_flops, data.forward_flops)} of the forward's ${flops(data.forward_flops)}` : "";
  byId("tiles").append(
    tile("kept for the backward", bytes(under.amounts.saved_bytes), `${percent(under.amounts.saved_bytes, without.amounts.saved_bytes)} of ${bytes(without.amounts.saved_bytes)} without recomputation`),
    tile("computed twice", flops(under.amounts.recomputed_flops), share),
    tile("simulated peak", bytes(peak(under)), `${percent(peak(under), peak(without))} of ${bytes(peak(without))}; at ${under.peak.at}`));
  const moved = under.amounts.offloaded;
  if (moved) byId("tiles").append(tile("offloaded", bytes(under.amounts.offloaded_bytes), `${count(moved, "value")} on the host between forward and backward, beside what is kept`));
  if (open) byId("tiles").append(tile("left to PyTorch", bytes(open), "counted as kept: its min-cut may recompute it"));
  const missing = Object.entries(data.uncounted).map(([name, calls]) => `${name}${calls > 1 ? ` ×${calls}` : ""}`);
  const lost = Object.values(data.uncounted_again).reduce((sum, calls) => sum + calls, 0);
  if (missing.length) byId("tiles").append(tile("without FLOPs", count(missing.length, "operator"), `${missing.join(", ")}: no formula, so counted as 0; ${count(lost, "call")} recomputed`));
  const held = data.expectations.filter((each) => each.status === "held").length;
  const told = (each) => `${each.text.replace(/^expect /, "")}: ${each.status === "deferred" ? "open, PyTorch decides" : `${each.status}, ${each.found}`}`;
  if (data.expectations.length) byId("tiles").append(tile("expectations held", `${held} of ${data.expectations.length}`, data.expectations.map(told).join("; ")));
}

showHead();
showMemory();
showBlocks();
showPolicy(chooseRule);
showNodes(chooseNode, letGo);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") letGo(); });
