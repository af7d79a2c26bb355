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
