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

showMemory();
showPolicy(chooseRule);
showNodes(chooseNode, letGo);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") letGo(); });
