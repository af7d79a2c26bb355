// The cursor over the step in time: by pointer, or with the arrow keys along a lane and from one to another.
function showLanes() {
  if (!data.order) return;
  const told = document.querySelector("#order + .legend .told");
  document.querySelectorAll("#order svg").forEach((svg, side) => {
    const step = data.order.steps[side];
    const whole = data.order.seconds * 1e9;
    const height = data.order.top + data.order.lane * step.lanes.length;
    const cursor = svg.appendChild(draw("line", { class: "cursor", y1: 0, y2: height, visibility: "hidden" }));
    let lane = step.lanes.length > 1 ? 1 : 0;
    let at = Math.max(0, step.lanes[lane].exposed.findIndex((value) => value > 0));
    // The last that begins no later; -1 before the first.
    function last(starts, time) {
      let low = 0, high = starts.length;
      while (low < high) { const middle = (low + high) >> 1; if (starts[middle] <= time) low = middle + 1; else high = middle; }
      return low - 1;
    }
    const alive = (time) => bytes(step.memory[1][Math.max(0, last(step.memory[0], time))] || 0);
    function words() {
      const { name, start, end, exposed, words } = step.lanes[lane];
      if (!start.length) return `${name}: nothing`;
      const wait = exposed[at] > 0 ? `, exposed ${times(exposed[at] / 1e9)}` : lane ? ", hidden" : "";
      return `${name}: ${words[at]}; ${times((end[at] - start[at]) / 1e9)} from ${times(start[at] / 1e9)}${wait}; ${alive(start[at])} alive`;
    }
    function place() {
      svg.setAttribute("aria-valuemax", Math.max(1, step.lanes[lane].start.length));
      svg.setAttribute("aria-valuenow", at + 1);
      svg.setAttribute("aria-valuetext", words());
    }
    function mark(time) {
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, (1000 * time) / whole);
      cursor.setAttribute("visibility", "visible");
    }
    function tell() {
      place();
      told.textContent = words();
      const { start, end } = step.lanes[lane];
      if (start.length) mark((start[at] + end[at]) / 2);
    }
    svg.setAttribute("role", "slider");
    svg.setAttribute("aria-valuemin", 1);
    place();
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const time = ((event.clientX - box.left) / box.width) * whole;
      const found = Math.floor((event.clientY - box.top - data.order.top) / data.order.lane);
      mark(time);
      if (time > step.seconds * 1e9 || time < 0) { told.textContent = ""; return; }
      if (found < 0 || found >= step.lanes.length) { told.textContent = `${times(time / 1e9)}: ${alive(time)} alive`; return; }
      const here = last(step.lanes[found].start, time);
      if (here < 0 || step.lanes[found].end[here] < time) {
        told.textContent = `${step.lanes[found].name}, ${times(time / 1e9)}: ${found ? "nothing is sent" : "nothing computes"}; ${alive(time)} alive`;
        return;
      }
      [lane, at] = [found, here];
      place();
      told.textContent = words();
    });
    svg.addEventListener("keydown", (event) => {
      const count = step.lanes[lane].start.length;
      const along = { ArrowLeft: -1, ArrowRight: 1, PageUp: -Math.ceil(count / 20), PageDown: Math.ceil(count / 20), Home: -count, End: count }[event.key];
      const across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (along) at = Math.min(count - 1, Math.max(0, at + along));
      else if (across) {
        const now = step.lanes[lane].start[at] || 0;
        lane = Math.min(step.lanes.length - 1, Math.max(0, lane + across));
        at = Math.max(0, last(step.lanes[lane].start, now));
      } else return;
      event.preventDefault();
      tell();
    });
  });
}
