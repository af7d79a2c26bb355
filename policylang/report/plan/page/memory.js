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
    const words = `${memory.names[at]}${inBlock ? ` in ${inBlock}` : ""}: ${bytes(first.moments[at])}, ${second.name.replace(/^peak /, "")} ${bytes(second.moments[at])}`;
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
