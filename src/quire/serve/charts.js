const $ = id => document.getElementById(id);
const num = n => Math.round(n).toLocaleString("en-US");
const pct = x => (100 * x).toFixed(x > 0 && x < .1 ? 1 : 0) + " %";
const time = s => s == null ? "–" : s < 1 ? (1000 * s).toFixed(s < .01 ? 1 : 0) + " ms" : s.toFixed(s < 10 ? 2 : 1) + " s";
const few = x => x == null ? "–" : x < 10 ? x.toFixed(1) : num(x);
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < 4) { n /= 1024; at++; }
  return (at && n < 10 ? n.toFixed(1) : num(n)) + " " + units[at];
}
function el(tag, attrs, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs || {})) {
    if (name === "style") Object.assign(made.style, value);
    else if (name.startsWith("on")) made[name] = value;
    else if (value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inside);
  return made;
}
function svg(tag, attrs) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attrs)) made.setAttribute(name, value);
  return made;
}
function key(kind, ...text) { return el("span", {}, el("span", { class: "key " + kind }), ...text); }
function table(head, rows) {
  if (!rows.length) return [el("div", { class: "dim" }, "nothing yet")];
  const line = (kind, cells) => el("tr", {}, ...cells.map(each => el(kind, {}, each)));
  return [el("div", { class: "scroll" }, el("table", {}, line("th", head), ...rows.map(cells => line("td", cells))))];
}

/* The next round number, as the top of an axis. */
function round(n) {
  if (n <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(n));
  return unit * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find(each => each * unit >= n * .999);
}
const WIDE = 600, HIGH = 120, MIN_SPAN = 120;
/* Runs of consecutive samples that have a value; where nothing ran, or no sample was taken, is a gap. */
function runs(samples, values, everyS) {
  const made = [];
  let run = null, before = null;
  samples.forEach((sample, at) => {
    if (values[at] == null || before === null || sample.at - before > 3 * everyS) run = null;
    if (values[at] != null) {
      if (!run) made.push(run = []);
      run.push(at);
    }
    before = sample.at;
  });
  return made;
}
/* The change of a counter over the last few samples before each; null where nothing was counted, or it began anew. */
function change(samples, name, back) {
  return samples.map((now, at) => {
    const before = samples[Math.max(0, at - back)];
    return at && now[name] >= before[name] ? { by: now[name] - before[name], s: now.at - before.at } : null;
  });
}
/* A chart of lines, or of areas on each other, over the time that samples span.
   series: {name, kind, values}; options: {top, show, stacked, everyS, unit} */
function chart(place, samples, series, options) {
  const { show, everyS, stacked } = options;
  const drawn = stacked ? series.map((_, n) => samples.map((_, at) => {
    const parts = series.slice(0, n + 1).map(each => each.values[at]);
    return parts.some(each => each == null) ? null : parts.reduce((a, b) => a + b, 0);
  })) : series.map(each => each.values);
  const most = drawn.flat().reduce((a, b) => b != null && b > a ? b : a, 0);
  if (!drawn.flat().some(each => each != null)) return place.replaceChildren(el("div", { class: "dim empty" }, "nothing ran in this time"));
  const top = options.top || round(most);
  const end = samples.length ? samples.at(-1).at : 0, begin = Math.min(samples.length ? samples[0].at : 0, end - MIN_SPAN);
  const x = at => WIDE * (samples[at].at - begin) / (end - begin), y = value => HIGH - 1 - (HIGH - 2) * value / top;
  const picture = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", "aria-label": options.label });
  for (const at of [1, HIGH / 2, HIGH - 1]) picture.append(svg("line", { class: "grid", x1: 0, x2: WIDE, y1: at, y2: at }));
  for (let n = series.length - 1; n >= 0; n--) {
    const color = `var(--${series[n].kind})`;
    for (const run of runs(samples, drawn[n], everyS)) {
      const line = run.map(at => `${x(at).toFixed(1)},${y(drawn[n][at]).toFixed(1)}`);
      if (!stacked) picture.append(svg("path", { class: "curve", stroke: color, d: "M" + line.join("L") + (run.length > 1 ? "" : "h.01") }));
      else picture.append(svg("path", { fill: color, d: `M${x(run[0]).toFixed(1)},${HIGH - 1}L${line.join("L")}L${Math.max(x(run.at(-1)), x(run[0]) + 1).toFixed(1)},${HIGH - 1}Z` }));
    }
  }
  const legend = el("div", { class: "legend small" });
  const tell = at => legend.replaceChildren(...series.map(each => key(each.kind, `${each.name} ${at < 0 || each.values[at] == null ? "–" : show(each.values[at])}`)),
    ...(at < 0 || at === samples.length - 1 ? [] : [el("span", { class: "dim" }, ago(end - samples[at].at))]));
  tell(samples.length - 1);
  const mark = svg("line", { class: "at", y1: 0, y2: HIGH, visibility: "hidden" });
  picture.append(mark);
  picture.onpointermove = event => {
    if (!samples.length) return;
    const box = picture.getBoundingClientRect(), wanted = begin + (end - begin) * (event.clientX - box.left) / box.width;
    let best = 0;
    samples.forEach((each, at) => { if (Math.abs(each.at - wanted) < Math.abs(samples[best].at - wanted)) best = at; });
    for (const name of ["x1", "x2"]) mark.setAttribute(name, x(best));
    mark.setAttribute("visibility", "visible");
    place.pointed = true;
    tell(best);
  };
  picture.onpointerleave = () => { place.pointed = false; mark.setAttribute("visibility", "hidden"); tell(samples.length - 1); };
  if (place.pointed) return; // it is being read
  place.replaceChildren(legend, el("div", { class: "chart small" },
    el("div", { class: "y dim" }, el("span", {}, show(top)), el("span", {}, "0")), picture,
    el("div", { class: "x dim" }, el("span", {}, ago(end - begin)), el("span", {}, "now"))));
}
function ago(s) { return s < 90 ? `${Math.round(s)} s ago` : `${Math.round(s / 60)} min ago`; }
